"""Checks of the preflight: measured on every rank, judged on rank 0."""
