"""Parts of tools/proofs/memory_cards.py: published figures, and the estimate beside them."""
