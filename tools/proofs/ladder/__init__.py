"""Parts of tools/proofs/measure_ladder.py: the rungs, and the ranks that measure them."""
