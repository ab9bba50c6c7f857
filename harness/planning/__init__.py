"""What a run will need, from the standard library alone."""
