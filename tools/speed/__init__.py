"""How fast a training step is, case by case."""
