"""The parity gate: layouts must not change training."""
