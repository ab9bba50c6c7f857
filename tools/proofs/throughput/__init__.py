"""Published runs, and how long the estimate says that they took."""
