"""Attention in linear memory: patterns, summaries, random features, hashes."""
