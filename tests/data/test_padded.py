"""Micro-batches of single documents: the same samples in any layout, and little padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.curriculum import Curriculum, Slice
from harness.config.data_section import DataConfig
from harness.data.batch import Batch
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.packing import IGNORED
from harness.data.padded import Padded
from harness.data.spec import DataSpec

BATCH, SEQ_LEN = 24, 64
WORDS = "the model reads a long question and answers it in a word or two".split()  # noqa: SIM905
Opened = Callable[..., Data]


@pytest.fixture
def opened(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_dir: str) -> Opened:
    """Opens 300 documents of skewed lengths, or a mixture of them and 200 others."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(int(draw.lognormvariate(2.3, 0.9)) + 1))

    path = write_jsonl(*({"text": text()} for _ in range(300)))
    other = tmp_path / "pairs.jsonl"
    other.write_text(
        "\n".join(f'{{"prompt": "{text()}", "completion": "{text()}"}}' for _ in range(200))
    )

    def build(batching: str, *, mixed: bool = False, seed: int = 0, **options: object) -> Data:
        paths: dict[str, object] = {"path": str(path)}
        if mixed:
            sources = [{"path": str(path), "share": 0.5}, {"path": str(other), "share": 0.5}]
            paths = {"mix": sources}
        settings = {"seq_len": SEQ_LEN, "held_out": 0.1, "tokenizer": tokenizer_dir}
        settings |= {"pool_samples": 96, "batching": batching, "cache_dir": str(tmp_path / "cache")}
        config = DataConfig.model_validate({**paths, **settings, **options})
        return build_data(DataSpec(config, seed))

    return build


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    """The documents of micro-batches, sorted: ids, then targets, without padding."""
    learned_ids = []
    for batch in batches:
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            learned = int((labels != IGNORED).nonzero().max()) + 2
            learned_ids.append((*ids[:learned].tolist(), *labels[:learned].tolist()))
    return sorted(learned_ids)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("batching", ["padded", "length_grouped", "token_budget"])
def test_a_step_reads_the_same_documents_in_every_layout(
    opened: Opened, batching: str, mixed: bool
) -> None:
    stream = opened(batching, mixed=mixed).train
    step = Slice(2 * BATCH, BATCH)
    whole = rows([stream.batch(2 * BATCH, BATCH)])
    for ranks, micro in ((1, 24), (1, 4), (2, 6), (3, 4), (4, 2)):
        data = [stream.step_data(step, micro, rank, ranks) for rank in range(ranks)]
        of_ranks = [of_rank.batches for of_rank in data]
        assert len({len(of_rank) for of_rank in of_ranks}) == 1
        together = [batch for of_rank in of_ranks for batch in of_rank]
        assert rows(together) == whole
        assert all(batch.input_ids.numel() <= micro * SEQ_LEN for batch in together)
        positions = sum(batch.input_ids.numel() for batch in together)
        tokens = int(stream.lengths(2 * BATCH + np.arange(BATCH)).sum())
        assert {(of.tokens, of.positions) for of in data} == {(tokens, positions)}
        targets = sum(int((batch.labels != IGNORED).sum()) for batch in together)
        assert targets == stream.targets_in(2 * BATCH, BATCH)
        if mixed:
            by_source = stream.targets_by_source(2 * BATCH + np.arange(BATCH))
            assert sum(by_source) == targets
            sources = np.bincount([n for b in together for n in b.sources.tolist()])
            assert batching != "padded" or sources.tolist() == [12, 12]
            assert len(sources) == 2


def test_an_epoch_has_every_document_once(opened: Opened) -> None:
    stream = opened("length_grouped", pool_samples=1024, group_samples=8).train
    packed = opened("packed", packing="whole").train
    learned = packed.targets_in(0, packed.samples)
    assert stream.targets_in(0, stream.samples) == learned
    assert stream.targets_in(stream.samples, stream.samples) == learned
    numbers = {stream.sample(index).spans[0].document for index in range(stream.samples)}
    assert len(numbers) == stream.samples == stream.documents


def test_documents_of_similar_length_leave_less_padding(opened: Opened) -> None:
    sorted_ones, by_budget = opened("length_grouped").train, opened("token_budget").train
    assert isinstance(sorted_ones, Padded)
    assert isinstance(by_budget, Padded)
    curriculum = Curriculum(BATCH)
    shares = sorted_ones.padding_shares(curriculum, 4, 2, 8)
    plain = shares.plain_padding_share
    assert shares.padding_share < 0.5 * plain < 0.5 * shares.full_padding_share
    fewer = by_budget.micro_batches(Slice(0, BATCH), 4, 0, 2)
    assert len(fewer) < len(sorted_ones.micro_batches(Slice(0, BATCH), 4, 0, 2)) == 3
    unsorted = opened("padded").train
    assert isinstance(unsorted, Padded)
    same = unsorted.padding_shares(curriculum, 4, 2, 8)
    assert same.padding_share == same.plain_padding_share


def test_reading_begins_anywhere(opened: Opened) -> None:
    """Steps from any sample on are those of a run that was never interrupted."""
    stream = opened("token_budget").train
    walked = stream.steps(0, curriculum=Curriculum(BATCH), micro_batch=4, data_ranks=2)
    for _ in range(3):
        expected = next(walked)
    walked.close()
    again = opened("token_budget").train
    resumed = again.steps(2 * BATCH, curriculum=Curriculum(BATCH), micro_batch=4, data_ranks=2)
    for ours, theirs in zip(next(resumed).batches, expected.batches, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
    resumed.close()
    other = opened("token_budget", seed=1).train
    assert rows([other.batch(0, BATCH)]) != rows([again.batch(0, BATCH)])


def test_the_held_out_documents_are_padded_alike(opened: Opened) -> None:
    data = opened("length_grouped")
    lengths = data.held_out.lengths(np.arange(24))
    first = next(n for n in range(20) if lengths[n : n + 4].max() < SEQ_LEN - 16)
    batch = data.held_out.batch(first, 4)
    assert batch.input_ids.shape == (4, -(-lengths[first : first + 4].max() // 8) * 8)
    assert data.unigram_nats > data.bigram_nats > 0
    assert batch.buckets(4, SEQ_LEN).max() == (batch.input_ids.shape[1] - 1) * 4 // SEQ_LEN
