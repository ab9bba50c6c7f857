"""The parts of tools/sweep.py."""
