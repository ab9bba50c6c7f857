"""Everything specific to DeepSpeed 0.19: its defects and its private names."""
