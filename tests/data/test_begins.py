"""Text and pairs get the ids that a tokenizer gives a request: one text, with its beginning."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from harness.config.data_section import DataConfig
from harness.data.encoding import Encoder, HowEncoded
from harness.data.pair import MaskWriter, write_indexed
from harness.data.source import tokens_key
from harness.data.spec import DataSpec, corpus_of
from harness.data.tokenizer import added_at_begin, tokenizer_hash
from harness.errors import ConfigError
from harness.files import pieces as pieces_module
from harness.files.corpus import find_corpus
from harness.files.data_format import BadLines
from harness.files.kept_sample import masks_of
from tests.data.conftest import Opened, Refused, Written
from tests.tables import beside

WORDS = "the model reads a long question and answers it in word or two".split()  # noqa: SIM905
MARK = "\u2581"


def spaced(legacy: bool) -> Tokenizer:
    """Return pieces with a mark for each space and one before every text, like Llama 2's."""
    letters = sorted({*"".join(WORDS), *"0123456789.,=+\n ", MARK})
    merges = [(MARK, "a"), ("t", "h"), ("th", "e"), (MARK, "the"), (MARK, MARK), ("e", "s")]
    vocab = ["<unk>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    tokens = {token: n for n, token in enumerate(vocab)}
    backend = Tokenizer(models.BPE(tokens, merges, unk_token="<unk>"))
    if legacy:
        marks = [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
        backend.normalizer = normalizers.Sequence(marks)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    return backend


def bytewise() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("Ġ", "a"), ("t", "h"), ("th", "e"), ("s", "w")]
    vocab = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(vocab)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": bytewise,
    "legacy": lambda: spaced(legacy=True),
    "metaspace": lambda: spaced(legacy=False),
}


def tokenizer_of(name: str, *, bos: bool = True) -> PreTrainedTokenizerFast:
    backend = BACKENDS[name]()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        begin = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [begin])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def documents(
    tokenizer: PreTrainedTokenizerFast, path: Path, learn: str = "assistant", bos: str = "auto"
) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of each document, and which of them are learned."""
    bad_lines, read, ids, learned = BadLines(), [], list[int](), list[bool]()
    begin = added_at_begin(tokenizer) if bos == "auto" else ()
    encoder = Encoder(find_corpus(str(path)), tokenizer, HowEncoded(learn, begin))
    for group in encoder.encoded(bad_lines):
        for part, encoded in group:
            marks = np.zeros(len(encoded.ids), dtype=bool)
            for start, stop in encoded.learned:
                marks[start:stop] = True
            ids, learned = ids + encoded.ids, learned + marks.tolist()
            if part.is_last:
                read.append((ids, learned))
                ids, learned = [], []
    bad_lines.require_none()
    return read


every = pytest.mark.parametrize("name", BACKENDS)
PAIRS = beside(__file__, "begins.toml")["pairs"]


@every
@pytest.mark.parametrize("bos", [True, False])
def test_a_pair_has_the_ids_of_one_text(write_jsonl: Written, name: str, bos: bool) -> None:
    tokenizer = tokenizer_of(name, bos=bos)
    path = write_jsonl(*({"prompt": prompt, "completion": answer} for prompt, answer in PAIRS))
    for (prompt, answer), (ids, learned) in zip(PAIRS, documents(tokenizer, path), strict=True):
        served = tokenizer(prompt + answer, return_offsets_mapping=True)
        assert ids == [*served["input_ids"], tokenizer.eos_token_id]
        places = served["offset_mapping"][int(bos) :]
        # A token that contains a character of the answer is learned, and so is the end.
        expected = [stop > len(prompt) for _, stop in places]
        assert learned == [False] * bos + expected + [True]
    everything = documents(tokenizer, path, learn="all")
    assert all(all(learned[int(bos) :]) for _, learned in everything)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("is_one_of_several", [True, False])
def test_spaces_outside_a_tokenizers_spans_are_read_and_learned(
    write_jsonl: Written, prefix: bool, is_one_of_several: bool
) -> None:
    plain, trimming = bytewise(), bytewise()
    for backend in (plain, trimming):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    trims = processors.ByteLevel(trim_offsets=True)
    trimming.post_processor = processors.Sequence([trims]) if is_one_of_several else trims
    full, trimmed = (
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        for backend in (plain, trimming)
    )
    pairs = [("  a\n", " is  3.  "), ("\nQ: a", "\nA: 3 "), (" ", " "), ("", "  a")]
    path = write_jsonl(*({"prompt": prompt, "completion": answer} for prompt, answer in pairs))
    read = documents(trimmed, path)
    assert read == documents(full, path)
    for (prompt, answer), (ids, _) in zip(pairs, read, strict=True):
        assert ids == [*full(prompt + answer).input_ids, full.eos_token_id]
    assert read[0][1] == [False] * read[0][1].index(True) + [True] * 10  # " is  3.  " and the end


@every
def test_text_gets_the_bos_of_its_tokenizer(write_jsonl: Written, name: str) -> None:
    tokenizer = tokenizer_of(name)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    path = write_jsonl({"text": "the word"}, {"text": "<s>the word"}, {"text": ""})
    read = documents(tokenizer, path)
    for text, (ids, learned) in zip(("the word", "<s>the word", ""), read, strict=True):
        served = tokenizer(text.removeprefix("<s>")).input_ids if name != "metaspace" else None
        assert ids.count(bos) == 1  # never doubled
        assert ids[0] == bos
        assert served is None or name == "legacy" or ids == [*served, eos]
        assert learned == [False, *[True] * (len(ids) - 1)]
    plain = documents(tokenizer, path, bos="off")
    assert plain[0][0] == read[0][0][1:]
    assert added_at_begin(tokenizer) == [bos]
    assert added_at_begin(tokenizer_of(name, bos=False)) == []


@every
@pytest.mark.parametrize("separator", [" ", ""])
@pytest.mark.parametrize("suffix", ["jsonl", "txt", "pair"])
def test_long_document_gets_no_bos_at_chunk_boundaries(
    tmp_path: Path,
    write_jsonl: Written,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    separator: str,
    suffix: str,
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_CHARS", 100)
    draw = random.Random(1)
    text = separator.join(draw.choice(WORDS) for _ in range(300))
    path = write_jsonl({"text": text})
    if suffix == "pair":
        path = write_jsonl({"prompt": text[:400], "completion": text[400:]})
    elif suffix == "txt":
        path = tmp_path / "long.txt"
        path.write_text(text)
    tokenizer = tokenizer_of(name)
    ((ids, learned),) = documents(tokenizer, path)
    served = tokenizer(text).input_ids
    if separator:
        assert ids == [*served, tokenizer.eos_token_id]
    else:  # a cut within a word splits at most one token
        assert tokenizer.decode(ids[1:-1]) == tokenizer.decode(served[1:])
    assert sum(learned) < len(ids) - 1 if suffix == "pair" else sum(learned) == len(ids) - 1


@every
@pytest.mark.parametrize("end", ["</s>", "</s>\n"])
def test_an_end_that_a_row_writes_is_not_doubled(write_jsonl: Written, name: str, end: str) -> None:
    tokenizer = tokenizer_of(name)
    segments = [{"label": False, "text": "the"}, {"label": True, "text": f" word{end}"}]
    path = write_jsonl(
        {"text": f"<s>the word{end}"}, {"prompt": "the", "completion": f" word{end}"}
    )
    read = documents(tokenizer, path)
    read += documents(tokenizer, write_jsonl({"segments": segments}))
    for ids, learned in read:
        assert ids.count(tokenizer.eos_token_id) == 1
        assert ids.count(tokenizer.bos_token_id) == 1
        assert learned[-1]
    # Within a text it does not end anything.
    ((ids, _),) = documents(tokenizer, write_jsonl({"text": "the</s>word"}))
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 2


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> str:
    tokenizer_of("bytes").save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def opened(opened: Opened) -> Opened:
    return partial(opened, seq_len=32)


def test_a_run_says_what_its_documents_begin_with(opened: Opened, write_jsonl: Written) -> None:
    tokenizer = tokenizer_of("bytes")
    path = write_jsonl(*({"text": f"the model reads {n}"} for n in range(40)))
    data, plain = (opened(path, bos=bos) for bos in ("auto", "off"))
    assert data.summary()[0].endswith(
        "every document begins with <s>, which the tokenizer adds to text, not learned (data.bos)"
    )
    assert [event["kind"] for event in data.events()] == ["begins_with"]
    assert not plain.events()
    assert data.tokens == plain.tokens + 40
    assert data.fingerprint != plain.fingerprint
    assert (data.begin, plain.begin) == ([tokenizer.bos_token_id], [])
    # Nothing else is masked: text is packed as text.
    assert not data.train.is_masked
    assert not data.train.holds_whole_documents
    assert not data.train.document_mask
    batch = data.train.batch(0, data.train.samples)
    assert (batch.labels != tokenizer.bos_token_id).all()
    assert (batch.input_ids == tokenizer.bos_token_id).sum() > 20
    assert (batch.labels != -100).sum() == data.train.targets_in(0, data.train.samples)


class Adding(PreTrainedTokenizerFast):
    """Adds a bos token itself, as slow tokenizers do: its vocabulary does not show it."""

    def __call__(self, *texts: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        made = super().__call__(*texts, add_special_tokens=False, **options)
        if add_special_tokens:
            made["input_ids"] = [self.bos_token_id, *made["input_ids"]]
        return made


def test_tokens_are_kept_by_the_ids_that_are_added(write_jsonl: Written) -> None:
    plain = tokenizer_of("bytes", bos=False)
    adding = Adding(tokenizer_object=plain.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    assert tokenizer_hash(adding) == tokenizer_hash(plain)
    path = write_jsonl({"text": "the model"})

    def key(tokenizer: PreTrainedTokenizerFast, bos: Literal["auto", "off"]) -> str:
        spec = DataSpec(DataConfig(path=str(path), bos=bos))
        return tokens_key(corpus_of(spec), tokenizer, spec)

    assert key(plain, "auto") == key(plain, "off") == key(adding, "off") != key(adding, "auto")
    corrected = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, bos_token="</s>", eos_token="</s>"
    )
    assert key(plain, "auto") == key(corrected, "auto")
    path = write_jsonl({"input_ids": [5, 6]})
    assert key(adding, "auto") == key(adding, "off")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_jsonl({"messages": turns})
    assert key(plain, "auto") != key(corrected, "auto")  # a template may write bos_token


def test_a_sample_of_text_that_a_run_kept_is_text(opened: Opened, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bytes")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for name, masked in (("text", [0, 5]), ("chats", [0, 1, 5]), ("one", [0, 3, 5])):
        writer, ids = MaskWriter(), [bos, 20, 21, 22, eos, bos, 23, 24]
        for _ in range(40):
            writer.add_learned(8, [(n, n + 1 + (n == 6)) for n in range(8) if n not in masked])
        write_indexed(tmp_path / name, 300, [(ids, True)] * 40)
        writer.save(masks_of(tmp_path / name))
        data = opened(tmp_path / name)
        assert data.train.is_masked == (name != "text")
        batch = data.train.batch(0, data.train.samples)
        assert (batch.labels != bos).all()


class SlowTokenizer(PreTrainedTokenizerFast):
    """Does not report the characters of its tokens."""

    is_fast = property(lambda self: False)  # type: ignore[assignment]


def test_tokenizer_without_offsets_splits_pairs_where_ids_differ(write_jsonl: Written) -> None:
    fast = tokenizer_of("bytes")
    backend = fast.backend_tokenizer
    tokenizer = SlowTokenizer(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    path = write_jsonl(*({"prompt": prompt, "completion": answer} for prompt, answer in PAIRS))
    assert documents(tokenizer, path) == documents(fast, path)
    for labels, is_told in (("011", True), ("0101", False), ("010", False), ("10", False)):
        segments = [{"text": "the word ", "label": label == "1"} for label in labels]
        path = write_jsonl({"segments": segments})
        if is_told:
            assert documents(tokenizer, path) == documents(fast, path)
        else:
            with pytest.raises(ConfigError, match="only the end of a text can be learned"):
                documents(tokenizer, path)
        assert all(documents(tokenizer, path, learn="all")[0][1][1:])
        assert documents(fast, path)[0][1][-1] == labels.endswith("1")


def test_rows_of_token_ids_are_kept(opened: Opened, refused: Refused, write_jsonl: Written) -> None:
    rows = [
        {"input_ids": [9, 10, 11, n + 20, 1], "labels": [9, -100, 11, n + 20, 1]} for n in range(30)
    ]
    data = opened(write_jsonl(*rows))
    batch = data.train.batch(0, data.train.samples)
    assert (data.tokens, data.train.is_masked) == (150, True)
    assert data.begin == []  # none is added
    assert {event["kind"] for event in data.events()} == {"packed_whole"}
    assert ((batch.labels == 11).sum(), (batch.labels == 10).sum()) == (data.train.documents, 0)
    for outside in (-1, 5000):
        path = write_jsonl(*rows, {"input_ids": [outside]})
        assert f":31: has the token id {outside}, outside the tok" in refused(path)[0]
    assert not opened(write_jsonl(*rows), learn="all", packing="whole").train.is_masked
    path = write_jsonl(*({**row, "labels": [9, 10, -100, *row["labels"][3:]]} for row in rows))
    assert opened(path).fingerprint != data.fingerprint
    (problem,) = refused(write_jsonl(*rows), tokenizer=None)
    assert ":1 holds token ids: set data.tokenizer to the one that" in problem
