"""Parts of tools/clean_data.py: recipes, datatrove pipelines, local and Slurm runs, the report."""
