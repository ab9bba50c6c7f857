"""Overhead of the harness: the same training by three programs, each in its own process."""
