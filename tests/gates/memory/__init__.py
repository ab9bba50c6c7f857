"""Parts of tests/gates/measure_memory.py: cases, ranks that run them, live bytes, comparisons."""
