"""Models, and their division over ranks, from the standard library alone."""
