from __future__ import annotations

import pytest

from harness.data.corpus import find_corpus
from harness.data.tokenizer import train_tokenizer
from tests.data.chat_tokenizers import tokenizer_of

WORDS = "the model reads a long question and answers it in a word or two\n"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tokenizer for a few words, which opens in 2 ms."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(WORDS * 20)
    train_tokenizer(find_corpus(str(folder / "text.txt")), folder / "small", 300)
    return str(folder / "small")


@pytest.fixture(scope="session")
def chatml_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tokenizer for conversations."""
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer_of("chatml").save_pretrained(folder)
    return str(folder)
