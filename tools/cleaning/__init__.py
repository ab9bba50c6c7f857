"""The parts of clean_data.py."""
