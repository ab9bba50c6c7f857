"""The pages of tools/studio.py, each with its settings, its computation and its drawing."""
