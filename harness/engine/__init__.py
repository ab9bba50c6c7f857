"""The engine: the only package that imports deepspeed."""
