"""A tokenizer of numbers that needs no training: "17" is token 17, and "2" ends a document."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write_number_tokenizer(folder: Path) -> str:
    backend = Tokenizer(models.WordLevel({str(n): n for n in range(400)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0", eos_token="2")
    tokenizer.save_pretrained(folder)
    return str(folder)
