"""A thin DeepSpeed harness for large decoder models."""
