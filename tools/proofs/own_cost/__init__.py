"""Costs of the harness itself on each of many ranks, counted on ranks that are threads."""
