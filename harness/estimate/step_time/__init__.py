"""The time of a step, counted from the same inputs as its memory."""
