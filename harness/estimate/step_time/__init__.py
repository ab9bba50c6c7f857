"""The time of a step, computed from the same inputs as its memory."""
