"""Parts of tools/estimate_memory.py: sweeps, text, pictures, traces of unknown models."""
