"""Parts of tools/show_layout.py: layout text, pipeline schedules, plots."""
