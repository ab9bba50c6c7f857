"""The steps of tools/accept_gpu.py: a file each, and how they are run and reported."""
