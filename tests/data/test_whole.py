"""Windows of whole documents, against the documents themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.data_section import DataConfig
from harness.config.run_file import load_run_config
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.packing import IGNORED
from harness.data.spec import DataSpec
from harness.data.tokenizer import encode
from harness.errors import ConfigError

SEQ_LEN = 48
WORDS = "the model reads a long question and answers it in a word or two".split()  # noqa: SIM905


def pairs(seed: int, count: int = 120) -> list[tuple[str, str]]:
    """Prompts and completions, of which a few are longer than a window, or empty."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(most)))

    return [(text(30), text(draw.choice([4, 12, 40]))) for _ in range(count)]


def opened(path: Path, tokenizer: str, **options: object) -> Data:
    settings = {"held_out": 0.2, "seq_len": SEQ_LEN, "cache_dir": str(path.parent / "cache")}
    config = DataConfig(path=str(path), tokenizer=tokenizer, **{**settings, **options})
    return build_data(DataSpec(config))


@pytest.mark.parametrize("too_long", ["cut", "drop"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_window_holds_whole_documents_and_padding(
    seed: int,
    too_long: str,
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    tokenizer_dir: str,
) -> None:
    texts = pairs(seed)
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in texts))
    data = opened(path, tokenizer_dir, too_long=too_long)
    documents, masked = {}, {}
    for number, both in enumerate(texts):
        prompt, completion = encode(data.tokenizer, [*both])
        whole = [*prompt, *completion, data.eos_id]
        if len(whole) > SEQ_LEN and too_long == "drop":
            continue
        documents[number], masked[number] = whole[:SEQ_LEN], len(prompt)
    learned = {n for n, ids in documents.items() if len(ids) > max(masked[n], 1)}
    assert len(learned) < len(documents) <= len(texts)
    seen = []
    for stream in (data.train, data.held_out):
        assert stream.holds_whole_documents
        targets = 0
        for index in range(stream.samples):
            sample = stream.sample(index)
            ids, labels = sample.batch.input_ids[0].tolist(), sample.batch.labels[0].tolist()
            positions = sample.batch.position_ids[0].tolist()
            column = 0
            for span in sample.spans:
                document, end = documents[span.document], span.column + span.last
                assert (span.first, span.last, span.column) == (0, len(document), column)
                assert ids[column:end] == document
                assert positions[column:end] == [*range(len(document))]
                hidden = masked[span.document]
                expected = [IGNORED if n < hidden else document[n] for n in range(len(document))]
                assert labels[column:end] == [*expected[1:], IGNORED]
                column = end
            left = SEQ_LEN - column
            assert positions[column:] == [*range(1, left + 1)]
            assert labels[column:] == [IGNORED] * left
            assert stream.targets_in(index, 1) == sum(label != IGNORED for label in labels)
            targets += stream.targets_in(index, 1)
            seen += [span.document for span in sample.spans]
        assert targets == stream.targets_in(0, stream.samples)
    assert sorted(seen) == sorted(learned)


def test_documents_that_are_too_long_are_refused_with_their_number(
    write_jsonl: Callable[..., Path], tokenizer_dir: str
) -> None:
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in pairs(0)))
    with pytest.raises(ConfigError, match=r"of \d+ documents are longer than data.seq_len = 48"):
        opened(path, tokenizer_dir, too_long="refuse")
    assert not [*path.parent.glob("cache/whole-*/")]
    opened(path, tokenizer_dir, too_long="refuse", seq_len=200)


def test_a_stream_of_pairs_is_what_it_was(
    write_jsonl: Callable[..., Path], tokenizer_dir: str
) -> None:
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in pairs(0)))
    stream = opened(path, tokenizer_dir, packing="stream").train
    assert not stream.holds_whole_documents
    assert torch.equal(
        stream.batch(0, 4).input_ids[:, 1:] * 0, stream.batch(0, 4).labels[:, :-1] * 0
    )


def test_text_is_packed_whole_where_that_is_asked_for(
    write_jsonl: Callable[..., Path], tokenizer_dir: str
) -> None:
    path = write_jsonl(*({"text": f"{p} {c}."} for p, c in pairs(0)))
    assert not opened(path, tokenizer_dir).train.holds_whole_documents
    stream = opened(path, tokenizer_dir, packing="whole", document_mask=False).train
    batch = stream.batch(0, stream.samples)
    assert batch.position_ids is None
    starts = np.cumsum([len(stream.sample(i).spans) for i in range(stream.samples)])[-1]
    assert starts == stream.documents
    first = stream.sample(0)
    assert first.batch.labels[0, 0] == first.batch.input_ids[0, 1]


def test_the_windows_are_made_once(
    tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_dir: str
) -> None:
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in pairs(0)))
    first = opened(path, tokenizer_dir)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    again = opened(path, tokenizer_dir)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == files
    assert torch.equal(first.train.batch(3, 9).labels, again.train.batch(3, 9).labels)


def test_damaged_counts_of_windows_are_named(
    tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_dir: str
) -> None:
    path = write_jsonl(*({"prompt": p, "completion": c} for p, c in pairs(0)))
    opened(path, tokenizer_dir)
    (facts,) = tmp_path.glob("cache/whole-*/train.json")
    facts.write_text(json.dumps({"too_long": 0}))
    with pytest.raises(ConfigError, match=r"train.json cannot be read .*: remove .*whole-"):
        opened(path, tokenizer_dir)


def test_only_whole_documents_can_be_too_long() -> None:
    with pytest.raises(ConfigError, match=r"data.packing=stream cuts documents of any length"):
        load_run_config(None, ["data.packing=stream", "data.too_long=drop"])
