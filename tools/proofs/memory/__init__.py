"""Parts of tools/proofs/measure_memory.py: cases, ranks that run them, live bytes, comparisons."""
