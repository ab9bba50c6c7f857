"""Parts of compare_divided.py."""
