"""Parts of tools/show_layout.py: the layout as text, a step over time, its picture."""
