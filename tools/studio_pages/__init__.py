"""The pages of tools/studio.py: of each a pure function from its settings to its figures."""
