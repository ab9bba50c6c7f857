"""Parts of tokenize_data.py, compare_tokenizers.py and train_tokenizer.py."""
