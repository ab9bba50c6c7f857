"""From text to batches: corpus, tokenizer, packing, sample order."""
