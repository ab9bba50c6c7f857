"""Files as they come from others: regular, bounded, of a known kind."""
