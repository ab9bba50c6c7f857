"""Parts of tools/rehearse.py: the small model and job, the stages."""
