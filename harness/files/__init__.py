"""Reads untrusted files: regular, of bounded size and of a known kind."""
