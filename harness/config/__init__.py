"""The two config files of a run: the run config and the DeepSpeed JSON."""
