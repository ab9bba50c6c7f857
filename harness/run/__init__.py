"""A run from start to end: build, steps, metrics, saves, resume, export."""
