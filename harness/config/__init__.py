"""What may be written: the run config and the DeepSpeed JSON."""
