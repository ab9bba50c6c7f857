"""data.packing, data.batching and data.too_long, through build_data."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.config.batch import Curriculum, Slice
from harness.data.batches import Contiguous, HeldOutText
from harness.data.data import Data
from harness.data.packing import IGNORED
from harness.errors import ConfigError
from harness.models.initialize import materialize
from harness.models.loss import forward
from harness.models.skeleton import hf_config, skeleton
from tests.data.batchings import SEQ_LEN, Corpus, Documents
from tests.data.conftest import Opened, Written
from tests.engine.small import MODEL

BATCH = 24
WORDS = "the model reads a long question and answers it in a word or two".split()  # noqa: SIM905


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture
def opened(opened: Opened, tmp_path: Path, write_jsonl: Written) -> Opened:
    """Return a function that opens `texts`, or 120 pairs, some too long or without a completion."""
    draw = random.Random(0)
    pairs = [(draw.randrange(20), draw.randrange(draw.choice([4, 12, 40]))) for _ in range(120)]
    records = [{"prompt": text(draw, a), "completion": text(draw, b)} for a, b in pairs]
    write_jsonl(*records, name="pairs.jsonl")
    lengths = [int(draw.lognormvariate(2.3, 0.9)) + 1 for _ in range(150)]
    write_jsonl(*({"text": text(draw, length)} for length in lengths), name="texts.jsonl")

    def build(name: str = "pairs", **options: Any) -> Any:
        options = {"seq_len": 48, "pool_samples": 96, **options}
        return opened(tmp_path / f"{name}.jsonl", **options)

    return build


def test_too_long_documents_are_rejected_with_their_number(opened: Opened, tmp_path: Path) -> None:
    lengths = np.diff(opened(packing="stream").sources[0].sides["train"].split.starts)
    message = r"of \d+ documents are longer than data.seq_len = 48 tokens \(the first is document "
    message += rf"\d+, the longest has {lengths.max()}\)"
    with pytest.raises(ConfigError, match=message):
        opened(too_long="refuse")
    assert not [*tmp_path.glob("cache/whole-*/")]
    opened(too_long="refuse", seq_len=400)
    cut, dropped = opened(), opened(too_long="drop")
    for data, done in ((cut, "cut at the end"), (dropped, "dropped")):
        number = sum(event.get("too_long", 0) for event in data.events())
        note, untrained = data.warnings()
        assert "have no token to learn within data.seq_len = 48 tokens" in untrained
        assert f"{number} of {data.documents} documents ({number / data.documents:.1%}) " in note
        text = f"longer than data.seq_len = 48 tokens and are {done}: raise data.seq_len, or"
        assert text in note
        assert [note] == [e["message"] for e in data.events() if e["kind"] == "too_long"]
    with pytest.raises(ConfigError, match=r"4 tokens \(.*\) and dropped: raise data.seq_len, or"):
        opened(too_long="drop", seq_len=4)
    fewer, more = (data.train.targets_in(0, data.train.samples) for data in (dropped, cut))
    assert fewer < more


def test_sample_counts_equal_those_trained_on(opened: Opened) -> None:
    for too_long in ("cut", "drop"):
        data = opened(too_long=too_long)
        train = data.train
        samples = [train.sample(number) for number in range(train.samples)]
        assert sum(len(sample.spans) for sample in samples) == train.documents < data.documents
        sides = {e["side"]: e for e in data.events() if e["kind"] == "packed_whole"}
        assert sides["train"]["learned"] == train.targets_in(0, train.samples)
        learned, untrained = (
            sum(side[key] for side in sides.values()) for key in ("learned", "without_target")
        )
        assert f" {learned:,} (" in data.summary()[0]
        (event,) = (e for e in data.events() if e["kind"] == "without_target")
        assert event["message"].partition(": ")[2].startswith(f"{untrained} documents have no")


def test_pairs_are_packed_whole_and_text_is_joined_by_default(opened: Opened) -> None:
    assert opened().train.holds_whole_documents
    joined = opened(packing="stream").train
    assert not joined.holds_whole_documents
    assert joined.document_mask
    assert not opened("texts").train.holds_whole_documents
    stream = opened("texts", packing="whole", document_mask=False).train
    batch = stream.batch(0, stream.samples)
    assert batch.position_ids is None
    assert sum(len(stream.sample(n).spans) for n in range(stream.samples)) == stream.documents


def test_windows_are_cached_and_damaged_counts_are_named(opened: Opened, tmp_path: Path) -> None:
    first = opened()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    again = opened()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == files
    assert torch.equal(first.train.batch(3, 9).labels, again.train.batch(3, 9).labels)
    (facts,) = tmp_path.glob("cache/whole-*/train.json")
    facts.write_text(json.dumps({"too_long": 0}))
    with pytest.raises(ConfigError, match=r"train.json cannot be read .*: remove .*whole-"):
        opened()


def test_documents_of_similar_length_leave_less_padding(opened: Opened) -> None:
    how = {"name": "texts", "seq_len": 64}
    grouped, by_budget, plain = (
        opened(**how, batching=batching).train
        for batching in ("length_grouped", "token_budget", "padded")
    )
    curriculum = Curriculum(BATCH)
    shares = grouped.padding_shares(curriculum, 4, 2, 8)
    assert shares.padding_share < 0.5 * shares.plain_padding_share
    assert shares.plain_padding_share < shares.full_padding_share
    steps = [Slice(first, BATCH) for first in range(0, 4 * BATCH, BATCH)]
    fewer, usual = (
        sum(len(stream.micro_batches(step, 4, 0, 2)) for step in steps)
        for stream in (by_budget, grouped)
    )
    assert fewer < usual == 3 * len(steps)
    same = plain.padding_shares(curriculum, 4, 2, 8)
    assert same.padding_share == same.plain_padding_share == shares.plain_padding_share
    positions = 8 * BATCH * 64
    full = 1 - grouped.tokens_in(0, 8 * BATCH) / positions
    assert shares.full_padding_share == pytest.approx(full)
    assert grouped.padding_shares(curriculum, 4, 2, 1) != shares


def test_held_out_documents_are_padded_alike(opened: Opened) -> None:
    data = opened("texts", seq_len=64, batching="length_grouped")
    lengths = data.held_out.lengths(np.arange(24))
    first = next(n for n in range(20) if lengths[n : n + 4].max() < 64 - 16)
    batch = data.held_out.batch(first, 4)
    assert batch.input_ids.shape == (4, -(-lengths[first : first + 4].max() // 8) * 8)
    assert data.unigram_nats > data.bigram_nats > 0
    assert batch.buckets(4, 64).max() == (batch.input_ids.shape[1] - 1) * 4 // 64


def test_data_that_cannot_be_contiguous_streams_is_refused(opened: Opened) -> None:
    with pytest.raises(ConfigError, match="but windows hold whole documents"):
        opened(rows=2)
    streams = {"packing": "stream", "document_mask": False}
    message = r"windows are too few for 9999 streams of text \(train.global"
    with pytest.raises(ConfigError, match=message):
        opened(rows=9999, **streams)
    data = opened(rows=2, **streams)
    assert isinstance(data.train, Contiguous)
    assert isinstance(data.held_out, HeldOutText)
    assert data.unigram_nats > data.bigram_nats > 0


def test_every_batching_has_the_epochs_gradient(opened: Opened, write_jsonl: Written) -> None:
    """Includes documents longer than data.seq_len, and rows with several documents."""
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(1.5, 0.9)) + 1 for _ in range(21)] + [70, 40]
    write_jsonl(*({"text": text(draw, length)} for length in lengths), name="few.jsonl")
    common = {"name": "few", "seq_len": 32, "held_out": 0.0}
    packed = _learned(opened(**common, packing="whole", document_mask=True), 1)
    for batching in ("padded", "length_grouped"):
        batched = _learned(opened(**common, batching=batching), 2)
        assert batched[0] == packed[0]
        torch.testing.assert_close(batched[1], packed[1], rtol=1e-5, atol=1e-5)


def _learned(data: Data, micro_batch: int) -> tuple[int, torch.Tensor]:
    """Return the number of targets of an epoch and the gradient of their summed losses."""
    torch.manual_seed(0)
    stream = data.train
    model = skeleton(hf_config({**MODEL, "vocab_size": data.vocab_size}), torch.float32)
    materialize(model, 0, torch.device("cpu"))
    targets = 0
    micro_batch = micro_batch if stream.samples % micro_batch == 0 else 1
    for batch in stream.micro_batches(Slice(0, stream.samples), micro_batch, 0, 1):
        losses, *_ = forward(model, batch.input_ids, batch.labels, batch.position_ids)
        losses.sum().backward()
        targets += int((batch.labels != IGNORED).sum())
    return targets, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("is_stored", [True, False])
def test_ids_outside_the_vocabulary_are_named(tmp_path: Path, is_stored: bool) -> None:
    corpus = Corpus(tmp_path, Documents.drawn([SEQ_LEN * 2] * 20, 0, is_stored))
    numbers = corpus.packed().split.numbers[:-1].tolist()
    ids = corpus.documents.ids
    worst = max(max(ids[number]) for number in numbers)
    document = next(number for number in numbers if worst in ids[number])
    everything = np.arange(corpus.packed().num_windows)
    corpus.packed(vocab_size=worst + 1).read(everything)
    message = rf"document {document} has token id {worst} at offset {ids[document].index(worst)}, "
    with pytest.raises(ConfigError, match=rf"{message}.* of {worst} "):
        corpus.packed(vocab_size=worst).read(everything)
