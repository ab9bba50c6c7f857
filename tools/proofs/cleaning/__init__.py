"""Parts of benchmark_cleaning.py: planted text, timed jobs, tables."""
