"""Files of a tokenizer that a run keeps, and those that an export gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from harness.data.tokenizer import load_tokenizer
from harness.data.tokenizer_files import SpecialIds, copy_tokenizer, has_pieces_of, save_tokenizer

TEXTS = [
    "the model reads a text",
    "  two  spaces,\ttabs\n\n\nand line breaks ",
    "def f(x):\n    return x  # é漢字 \U0001f600",
    "</s> <s> <unk> are text",
    "",
]


@pytest.fixture
def kept(library: object, tmp_path: Path) -> Path:
    """The folder of a run's tokenizer, which was trained here."""
    save_tokenizer(library.tokenizer, tmp_path / "kept")  # type: ignore[attr-defined]
    return tmp_path / "kept"


def test_sentencepiece_opens_its_own_model_and_gives_the_same_ids(kept: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(kept)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(kept / "tokenizer.model"))
    assert len(theirs) == len(tokenizer)
    for text in TEXTS:
        assert theirs.encode(text) == tokenizer(text, add_special_tokens=False).input_ids
    # llama.cpp asks for each piece's score; merges are by rank, so it falls from piece to piece.
    normal = [n for n in range(len(theirs)) if not (theirs.is_control(n) or theirs.is_byte(n))]
    scores = [theirs.get_score(number) for number in normal if not theirs.is_unknown(number)]
    assert len(set(scores)) > 1000
    assert scores == sorted(scores, reverse=True)


def test_a_tokenizer_keeps_its_ids_beside_its_model(kept: Path, tmp_path: Path) -> None:
    (kept / "tokenizer.model").rename(tmp_path / "elsewhere")
    without = load_tokenizer(kept)
    (tmp_path / "elsewhere").rename(kept / "tokenizer.model")
    with_model = load_tokenizer(kept)
    assert with_model.get_vocab() == without.get_vocab()
    for text in TEXTS:
        assert with_model(text).input_ids == without(text).input_ids


def test_another_model_is_not_taken_for_the_tokenizers(kept: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(kept)
    model = (kept / "tokenizer.model").read_bytes()
    assert has_pieces_of(tokenizer, model)
    assert not has_pieces_of(tokenizer, model[: len(model) // 2])
    assert not has_pieces_of(tokenizer, b"IQ== 0\nIg== 1\n")  # as tiktoken's files begin
    (kept / "tokenizer.model").write_bytes(b"IQ== 0\n")
    save_tokenizer(tokenizer, tmp_path / "again")
    assert not (tmp_path / "again" / "tokenizer.model").exists()


def test_regular_files_of_a_tokenizer_are_copied_alone(kept: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not to be shared")
    (kept / "vocab.txt").symlink_to(secret)
    (kept / "tokenizer_link.json").symlink_to("tokenizer.json")
    (kept / "code.py").write_text("raise SystemExit")
    (kept / "notes.md").touch()
    os.mkfifo(kept / "merges.txt")
    (kept / "chat_template.jinja").write_text("{{ messages }}")
    templates = kept / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ tools }}")
    (templates / "other.jinja").symlink_to(secret)
    for name in ("out", "trusted"):
        (tmp_path / name).mkdir()
    left = copy_tokenizer(kept, tmp_path / "out")
    assert left == [
        *("code.py", "merges.txt", "notes.md", "tokenizer_link.json", "vocab.txt"),
        "additional_chat_templates/other.jinja",
    ]
    copied = sorted(
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")
    )
    assert copied == [
        "additional_chat_templates",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    assert "code.py" not in copy_tokenizer(kept, tmp_path / "trusted", with_code=True)


IDS = SpecialIds(bos=1, eos=2, pad=None, unk=0, special=frozenset({0, 1, 2, 7, 8}))


@pytest.mark.parametrize(
    ("config", "bos", "eos", "pad"),
    [
        ({}, 1, 2, None),
        ({"bos_token_id": 128000, "eos_token_id": 128001}, 1, 2, None),
        ({"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}, 1, 2, None),  # gemma's
        ({"eos_token_id": 7, "pad_token_id": 8}, 1, 2, 8),
        ({"eos_token_id": [7, 8]}, 1, [2, 7, 8], None),
        ({"eos_token_id": [7, 2, 8]}, 1, [7, 2, 8], None),
        ({"eos_token_id": [5, 128009, "x", None]}, 1, 2, None),
        ({"eos_token_id": None, "bos_token_id": None, "pad_token_id": -1}, 1, 2, None),
        ({"eos_token_id": "x", "pad_token_id": [7]}, 1, 2, None),
    ],
)
def test_special_ids_are_the_tokenizers(
    config: dict[str, object], bos: int, eos: object, pad: int | None
) -> None:
    expected = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    assert IDS.in_place_of(config) == expected


def test_a_config_keeps_what_the_tokenizer_has_not() -> None:
    """Qwen's tokenizer has no token that begins a text, its config has one."""
    qwen = SpecialIds(bos=None, eos=2, pad=2, unk=None, special=frozenset({2, 3}))
    assert qwen.in_place_of({"bos_token_id": 3})["bos_token_id"] == 3
    assert qwen.in_place_of({"bos_token_id": 4})["bos_token_id"] is None
