"""A run: built, begun, watched, saved, measured, ended."""
