"""Text to batches: corpus, tokenizer, packing, order."""
