"""Parts of tests/gates/generate_ds_keys.py: what DeepSpeed says of its keys, and we of them."""
