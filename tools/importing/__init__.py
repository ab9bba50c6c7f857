"""Checkpoints of DeepSpeed's own format, read without running anything that is in them."""
