"""What the harness itself costs each of many ranks, counted on ranks that are threads."""
