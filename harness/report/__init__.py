"""A run folder as one page that opens without a network."""
