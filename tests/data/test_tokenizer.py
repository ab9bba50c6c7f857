"""Tokenizers: any text is restored, exports give the same ids, and a run's copy is complete."""

import json
import os
import random
import re
import socket
import time
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from harness.config.data_section import DEFAULT_VOCAB_SIZE
from harness.data.data import Data
from harness.data.tokenizer import (
    EOS,
    encode,
    load_tokenizer,
    read_otherwise,
    to_backend,
    tokenizer_hash,
    train_model,
    train_tokenizer,
    training_sentences,
)
from harness.data.tokenizer_files import (
    SpecialIds,
    companions_of,
    copy_companions,
    copy_tokenizer,
    has_pieces_of,
    save_companions,
    save_tokenizer,
)
from harness.errors import ConfigError
from harness.files import hub
from harness.files import pieces as pieces_module
from harness.files.corpus import Corpus, find_corpus
from harness.layout.releases import is_older
from tests.data.conftest import Written
from tests.engine.small import MODEL
from tests.tables import beside

TABLES = beside(__file__, "tokenizer.toml")
NASTY = [*TABLES["nasty"], "x" * 10_000, " " * 1001, "ab" * 3000 + " " * 77 + "\t" * 33]


def texts_of(library: Data, count: int) -> list[str]:
    """Return `count` texts: short documents of the library and random excerpts of others."""
    whole = [piece.text for piece in library.sources[0].corpus.pieces()]
    cutter = random.Random(0)
    texts = [text for text in whole if len(text) < 10_000]
    while len(texts) < count:
        text = cutter.choice(whole)
        start = cutter.randrange(len(text) + 1)
        texts.append(text[start : start + cutter.randrange(3000)])
    return texts


def random_unicode(count: int) -> list[str]:
    chooser = random.Random(1)
    alphabet = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) != "Cs"]
    return ["".join(chooser.choices(alphabet, k=chooser.randrange(40))) for _ in range(count)]


def test_tokenizer_round_trips_any_text(library: Data) -> None:
    tokenizer = library.tokenizer
    texts = [*texts_of(library, 200), *NASTY, *random_unicode(200)]
    for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.eos_token_id not in ids


def test_the_export_gives_the_same_ids_as_training(library: Data, tmp_path: Path) -> None:
    """Exported twice, called as users call it, one text at a time and all at once."""
    library.tokenizer.save_pretrained(tmp_path / "export")
    once = AutoTokenizer.from_pretrained(tmp_path / "export")
    once.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    texts = [*texts_of(library, 200), *NASTY, *random_unicode(200)]
    trained_on = encode(library.tokenizer, texts)
    for exported in (once, again):
        assert exported(texts)["input_ids"] == trained_on
        assert [exported.encode(text) for text in texts[-120:]] == trained_on[-120:]
        assert exported.eos_token_id == library.eos_id
        assert tokenizer_hash(exported) == tokenizer_hash(library.tokenizer)


def test_no_piece_reaches_over_the_end_of_a_word(library: Data) -> None:
    """Therefore long documents may be cut before a space (corpus._CUT) without changing an id."""
    assert not [text for text in library.tokenizer.get_vocab() if re.search("[^ ] ", text)]


def test_a_document_read_in_pieces_has_the_same_ids(library: Data, tmp_path, monkeypatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(texts_of(library, 200)))
    whole = encode(library.tokenizer, [path.read_text()])[0]
    monkeypatch.setattr(pieces_module, "PIECE_CHARS", 20_000)
    pieces = [piece.text for piece in find_corpus(str(path)).pieces()]
    assert len(pieces) > 10
    assert [n for ids in encode(library.tokenizer, pieces) for n in ids] == whole


@pytest.mark.parametrize("text", ["a", "tiny text", "日本語 " * 50, " ", "▁"])
def test_tokenizer_trains_on_little_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "little.txt").write_text(text)
    corpus = find_corpus(str(tmp_path / "little.txt"))
    train_tokenizer([corpus], tmp_path / "tokenizer", DEFAULT_VOCAB_SIZE)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    for sample in [text, *NASTY]:
        assert tokenizer.decode(encode(tokenizer, [sample])[0]) == sample


def test_the_vocabulary_may_be_small_but_holds_the_characters(tmp_path: Path) -> None:
    draw, letters = random.Random(0), [*map(chr, range(33, 127))]
    words = ["".join(draw.choices(letters, k=5)) for _ in range(300)]
    (tmp_path / "text.txt").write_text(" ".join(words * 5))
    corpus = find_corpus(str(tmp_path / "text.txt"))
    train_tokenizer([corpus], tmp_path / "tokenizer", 512)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert len(tokenizer) == 512
    for sample in NASTY:
        assert tokenizer.decode(encode(tokenizer, [sample])[0]) == sample
    with pytest.raises(ConfigError, match=r"data.vocab_size is 300: .* more characters and bytes"):
        train_tokenizer([corpus], tmp_path / "none", 300)


def test_a_large_corpus_is_thinned(write_jsonl: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(*({"text": f"line {n}"} for n in range(1000)))
    monkeypatch.setattr("harness.data.tokenizer.TRAINING_CHARS", 2000)
    kept = [*training_sentences([find_corpus(str(path))])]
    assert 50 < len(kept) < 120
    assert kept[0] != kept[-1]


def test_other_tokenizers_are_called_as_they_are(tmp_path: Path) -> None:
    """Truncation, padding and special tokens of a tokenizer.json have no effect."""
    (tmp_path / "text.txt").write_text("one two three four five six\n" * 9)
    backend = to_backend(train_model([find_corpus(str(tmp_path / "text.txt"))], 300))
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    special = {"eos_token": EOS, "bos_token": "<s>", "pad_token": "<unk>"}
    other = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    other.add_bos_token = True
    other.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    identity = tokenizer_hash(loaded)
    texts = ["one two three four five six", "a</s>b"]
    encoded = encode(loaded, texts)  # before its own calls set anything
    expected = [loaded(t, add_special_tokens=False, truncation=False)["input_ids"] for t in texts]
    assert encoded == expected
    assert tokenizer_hash(loaded) == identity
    assert len(expected[0]) > 4
    assert loaded.eos_token_id in expected[1]  # this one reads its special tokens in text


def test_a_folder_without_a_tokenizer_or_its_eos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tokenizer: set data"):
        load_tokenizer(tmp_path)
    backend = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["my-tokenizr", "owner/my-tokenizr", "./tokenizr", "/no/where/t"])
def test_a_missing_tokenizer_is_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited for the hub"))
    with pytest.raises(ConfigError, match=r"no such folder, .* set data.tokenizer"):
        load_tokenizer(name)


def test_the_corpus_is_never_empty_for_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text('\n\n{"text": "\\u0000"}\n')
    corpus = Corpus("text", tmp_path, (tmp_path / "blank.jsonl",))
    with pytest.raises(ConfigError, match="no text"):
        train_tokenizer([corpus], tmp_path / "tokenizer", DEFAULT_VOCAB_SIZE)


@pytest.fixture
def kept(library: Data, tmp_path: Path) -> Path:
    """Return the folder of a run's tokenizer that was trained here."""
    save_tokenizer(library.tokenizer, tmp_path / "kept")
    return tmp_path / "kept"


def test_sentencepiece_opens_its_model_with_the_same_ids(library: Data, kept: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(kept)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(kept / "tokenizer.model"))
    assert len(theirs) == len(tokenizer) == 8192
    # SentencePiece reads a literal U+2581 as a space, so it cannot restore it; we can.
    texts = [*texts_of(library, 200), *random_unicode(200), *NASTY]
    texts = [text for text in texts if "\u2581" not in text]
    assert theirs.encode(texts) == encode(tokenizer, texts)
    # llama.cpp asks for each piece's score; merges are ranked, so it falls from piece to piece.
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
    assert with_model(NASTY).input_ids == without(NASTY).input_ids


def test_another_model_is_not_taken_for_the_tokenizers(kept: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(kept)
    model = (kept / "tokenizer.model").read_bytes()
    assert has_pieces_of(tokenizer, model)
    assert not has_pieces_of(tokenizer, model[: len(model) // 2])
    assert not has_pieces_of(tokenizer, b"IQ== 0\nIg== 1\n")  # as tiktoken's files begin
    (kept / "tokenizer.model").write_bytes(b"IQ== 0\n")
    save_tokenizer(tokenizer, tmp_path / "again", str(kept))
    assert not (tmp_path / "again" / "tokenizer.model").exists()


def test_a_tokenizer_with_more_tokens_keeps_its_model(kept: Path, tmp_path: Path) -> None:
    """Saved by save_pretrained, which leaves it out, it is that of the initial weights."""
    tokenizer = AutoTokenizer.from_pretrained(kept)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    save_tokenizer(tokenizer, tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "bare")
    bare = load_tokenizer(tmp_path / "bare")
    save_tokenizer(bare, tmp_path / "again", str(kept))
    models = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("whole", "again")]
    assert models == [(kept / "tokenizer.model").read_bytes()] * 2
    save_tokenizer(bare, tmp_path / "alone")
    assert not (tmp_path / "alone" / "tokenizer.model").exists()


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
    out = tmp_path / "out"
    copied = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    assert copied == TABLES["copied"]
    assert "code.py" not in copy_tokenizer(kept, tmp_path / "trusted", with_code=True)


IDS = SpecialIds(bos=1, eos=2, pad=None, unk=0, special=frozenset({0, 1, 2, 7, 8}))


@pytest.mark.parametrize(("config", "bos", "eos", "pad"), TABLES["special_ids"])
def test_special_ids(config: dict[str, object], bos: int, eos: object, pad: int | None) -> None:
    expected = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    assert IDS.in_place_of(config) == expected


def test_a_config_keeps_what_the_tokenizer_has_not() -> None:
    """Qwen's tokenizer has no bos token, but its config does."""
    qwen = SpecialIds(bos=None, eos=2, pad=2, unk=None, special=frozenset({2, 3}))
    assert qwen.in_place_of({"bos_token_id": 3})["bos_token_id"] == 3
    assert qwen.in_place_of({"bos_token_id": 4})["bos_token_id"] is None


def test_files_beside_the_initial_weights_are_kept_for_exports(tmp_path: Path) -> None:
    given, kept, export = (tmp_path / name for name in ("given", "kept", "export"))
    for folder in (given, kept, export):
        folder.mkdir()
    companions = ("LICENSE", "preprocessor_config.json", "processor_config.json")
    others = ("config.json", "model.safetensors", "model.safetensors.index.json", "latest")
    others += ("tokenizer.json", "tokenizer.model", "modeling_own.py", ".gitattributes", "a.gguf")
    for name in (*companions, *others):
        (given / name).write_text(name)
    (given / "link.json").symlink_to("/etc/passwd")
    with (given / "large.npz").open("wb") as large:
        large.truncate(1 << 25)
    save_companions(str(given), kept, None)
    (export / "LICENSE").write_text("own")
    (given / "copied").mkdir()
    assert copy_companions(companions_of(kept), export) == [*companions[1:]]
    assert (export / "LICENSE").read_text() == "own"
    assert sorted(path.name for path in companions_of(kept).iterdir()) == [*companions]
    assert copy_tokenizer(kept, given / "copied") == []
    save_companions(str(tmp_path), export, kept)  # the run that the weights come from
    assert (companions_of(export) / "LICENSE").read_text() == "LICENSE"


def test_a_generic_tokenizer_is_opened_as_its_folder_says(tmp_path: Path) -> None:
    """AutoTokenizer of transformers 5 would take Qwen2Tokenizer, which loses these spaces."""
    train_tokenizer([find_corpus(str(Path(__file__)))], tmp_path, 500)
    before = load_tokenizer(tmp_path)("two words")["input_ids"]
    assert not read_otherwise(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "model_type": "qwen2"}))
    assert load_tokenizer(tmp_path)("two words")["input_ids"] == before
    assert read_otherwise(tmp_path) == ("" if is_older((5, 0)) else "Qwen2Tokenizer")
