"""How ranks divide a model, from the standard library alone."""
