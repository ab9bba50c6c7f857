"""Attention in linear memory: sparse patterns, summaries, random features, hashing."""
