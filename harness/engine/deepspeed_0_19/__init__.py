"""Everything that is true of DeepSpeed 0.19 alone: its defects, and its private names."""
