"""The parts of tools/exercise.py."""
