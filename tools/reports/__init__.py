"""Parts of tools/report.py."""
