"""Hugging Face decoders: built on the meta device, initialised by parameter name."""
