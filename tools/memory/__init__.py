"""Parts of tools/estimate_memory.py: sweeps, text, plots."""
