"""Checks of the preflight: one noun a file, measured on every rank and judged on rank 0."""
