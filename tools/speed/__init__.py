"""Training speed, case by case."""
