"""The steps of tools/accept_gpu.py; each fills a Bench with checks."""
