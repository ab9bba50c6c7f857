"""Parts of tools/measure_memory.py: cases, the ranks that run them, bytes counted and compared."""
