"""Models and their distribution over ranks. Standard library only."""
