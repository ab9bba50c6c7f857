"""Reads checkpoints in DeepSpeed's own format without running any code in them."""
