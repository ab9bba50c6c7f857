"""Hugging Face decoders: built empty, initialised by name."""
