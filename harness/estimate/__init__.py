"""The memory and time that a plan will take, computed with the standard library alone."""
