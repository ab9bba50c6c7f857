"""Parts of tests/gates/measure_memory.py: cases, workers, live bytes, comparisons."""
