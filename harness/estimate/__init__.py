"""The bytes that a plan comes to, from the standard library alone."""
