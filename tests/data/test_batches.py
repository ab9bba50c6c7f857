from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from harness.config.curriculum import Curriculum
from harness.config.data_section import DataConfig
from harness.data.batch import Batch
from harness.data.batches import Stream, load_ahead, share_of_rank
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec

GLOBAL_BATCH = 24
SPLITS = [(1, 24), (1, 8), (1, 1), (2, 6), (2, 12), (3, 4), (4, 2), (8, 3), (24, 1)]


def same(ours: Batch, theirs: Batch) -> bool:
    return torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize(("ranks", "micro_batch"), SPLITS)
def test_ranks_and_micro_steps_share_the_global_batch(ranks: int, micro_batch: int) -> None:
    shares = [share_of_rank(1000, GLOBAL_BATCH, micro_batch, r, ranks) for r in range(ranks)]
    accumulation = GLOBAL_BATCH // ranks // micro_batch
    assert {share.shape for share in shares} == {(accumulation, micro_batch)}
    everything = np.concatenate([share.ravel() for share in shares])
    assert sorted(everything.tolist()) == list(range(1000, 1000 + GLOBAL_BATCH))


def test_the_share_is_as_documented() -> None:
    assert share_of_rank(100, 12, 2, 1, 3).tolist() == [[102, 103], [108, 109]]
    with pytest.raises(AssertionError, match="global_batch 10 is no multiple of 3 ranks x 2"):
        share_of_rank(0, 10, 2, 0, 3)


def test_batches_are_copied_to_a_device_from_pinned_memory() -> None:
    """From other memory the host waits for the device in each copy."""
    ids = torch.zeros(2, 4, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    pin = mock.Mock(side_effect=torch.clone)
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: pin(tensor)):
        moved = Batch(ids, ids, positions).on(torch.device("meta"))
    assert pin.call_count == 3
    assert {tensor.device.type for tensor in moved if tensor is not None} == {"meta"}
    assert Batch(ids, ids, None).on(torch.device("cpu"))[0] is ids


@pytest.mark.parametrize(("ranks", "micro_batch"), SPLITS)
def test_the_samples_do_not_depend_on_the_split(
    library: Data, ranks: int, micro_batch: int
) -> None:
    whole = library.train.batch(48, GLOBAL_BATCH)
    rows = {}
    for rank in range(ranks):
        share = share_of_rank(48, GLOBAL_BATCH, micro_batch, rank, ranks)
        steps = library.train.steps(
            48,
            curriculum=Curriculum(GLOBAL_BATCH),
            micro_batch=micro_batch,
            data_rank=rank,
            data_ranks=ranks,
        )
        batches = next(steps).batches
        steps.close()
        for samples, batch in zip(share, batches, strict=True):
            assert batch.input_ids.shape == (micro_batch, 128)
            rows.update(zip(samples.tolist(), batch.input_ids, strict=True))
    assert torch.equal(torch.stack([rows[48 + i] for i in range(GLOBAL_BATCH)]), whole.input_ids)


def test_a_batch_is_its_samples(library: Data) -> None:
    batch = library.train.batch(7, 5)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.position_ids is None
    assert batch.input_ids.is_contiguous()
    assert batch.labels.is_contiguous()
    for row in range(5):
        sample = library.train.sample(7 + row).batch
        assert torch.equal(batch.input_ids[row : row + 1], sample.input_ids)
        assert torch.equal(batch.labels[row : row + 1], sample.labels)
    assert torch.equal(batch.input_ids[:, 1:], batch.labels[:, :-1])


def test_positions_restart_when_documents_are_masked(cache_dir: Path) -> None:
    data = build_data(
        DataSpec(DataConfig(cache_dir=str(cache_dir), document_mask=True, seq_len=2000))
    )
    batch = data.train.batch(0, 16)
    assert batch.position_ids is not None
    ended = batch.input_ids[:, :-1] == data.eos_id
    assert ended.any()
    assert (batch.position_ids[:, 1:][ended] == 0).all()
    steps = batch.position_ids.diff(dim=1)
    assert (steps[~ended] == 1).all()
    assert (batch.position_ids[:, 0] == 0).all()


@pytest.mark.parametrize("document_mask", [True, False])
def test_a_sample_that_is_cut_is_what_shorter_samples_are(
    cache_dir: Path, document_mask: bool
) -> None:
    """Positions, too: those of a run with the shorter data.seq_len, where documents go on from the
    piece before and where they begin inside."""
    long, short = (
        build_data(
            DataSpec(
                DataConfig(cache_dir=str(cache_dir), document_mask=document_mask, seq_len=seq_len)
            )
        ).train
        for seq_len in (2000, 250)
    )
    place_of_window = {short.sample(index).window: index for index in range(short.samples)}
    ended = 0
    for index in range(40):
        pieces = long.batch(index, 1).cut(8)
        for row in range(8):
            expected = short.batch(place_of_window[long.sample(index).window * 8 + row], 1)
            assert torch.equal(pieces.input_ids[row], expected.input_ids[0])
            assert torch.equal(pieces.labels[row], expected.labels[0])
            if expected.position_ids is None or pieces.position_ids is None:
                assert pieces.position_ids is expected.position_ids is None
                continue
            assert torch.equal(pieces.position_ids[row], expected.position_ids[0])
            ended += bool((expected.position_ids[0] != torch.arange(250)).any())
    assert (ended > 0) == document_mask


def test_an_epoch_reads_every_window_once(library: Data) -> None:
    stream = library.held_out
    windows = [stream.sample(i).window for i in range(stream.samples)]
    assert sorted(windows) == list(range(stream.samples))
    following = [stream.sample(i).window for i in range(stream.samples, 2 * stream.samples)]
    assert sorted(following) == sorted(windows) != following
    assert [stream.sample(i).epoch for i in (0, stream.samples - 1, stream.samples)] == [0, 0, 1]


def test_a_global_batch_larger_than_the_epoch_wraps(library: Data) -> None:
    stream = library.held_out
    many = stream.batch(stream.samples - 3, stream.samples + 10)
    assert len(many.input_ids) == stream.samples + 10
    assert torch.equal(many.input_ids[3:4], stream.batch(stream.samples, 1).input_ids)
    assert stream.targets_in(0, 3 * stream.samples) == 3 * stream.samples * 128


def test_the_seed_reorders_training_but_not_the_held_out(library: Data, cache_dir: Path) -> None:
    other = build_data(DataSpec(DataConfig(cache_dir=str(cache_dir)), seed=1))
    assert other.fingerprint == library.fingerprint
    assert not same(other.train.batch(0, 4), library.train.batch(0, 4))
    assert same(other.held_out.batch(0, 4), library.held_out.batch(0, 4))


def test_steps_go_on_from_what_was_consumed(library: Data) -> None:
    def take(stream: Stream, consumed: int, count: int) -> list[list[Batch]]:
        steps = stream.steps(
            consumed, curriculum=Curriculum(4), micro_batch=1, data_rank=1, data_ranks=2
        )
        taken = [next(steps).batches for _ in range(count)]
        steps.close()
        return taken

    undisturbed = take(library.train, 0, 6)
    resumed = take(library.train, 12, 3)
    assert [len(step) for step in undisturbed] == [2] * 6
    for one, other in zip(undisturbed[3:], resumed, strict=True):
        assert all(same(a, b) for a, b in zip(one, other, strict=True))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("load_ahead")]


def wait_until_none() -> None:
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_everything_is_loaded_in_order(depth: int) -> None:
    items = load_ahead(lambda n: n * n, depth)
    assert [next(items) for _ in range(20)] == [n * n for n in range(20)]
    items.close()


def test_loading_stays_at_most_depth_ahead() -> None:
    loaded: list[int] = []
    items = load_ahead(lambda n: loaded.append(n) or n, 3)
    assert [next(items), next(items)] == [0, 1]
    time.sleep(0.3)
    assert loaded == [0, 1, 2, 3, 4]
    items.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_is_raised_at_its_place(depth: int) -> None:
    def load(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    items = load_ahead(load, depth)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(items)
    wait_until_none()


@pytest.mark.parametrize("end", ["close", "forget"])
def test_closing_or_forgetting_ends_the_thread(end: str) -> None:
    items = load_ahead(lambda n: n, 2)
    next(items)
    assert threads()
    if end == "close":
        items.close()
        with pytest.raises(StopIteration):
            next(items)
    del items
    gc.collect()
    wait_until_none()


def test_bounds_count_documents_over_rows_end_to_end() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    bounds = Batch(ids, ids, positions).bounds
    assert bounds.places.tolist() == [0, 3, 4, 6, 12]
    assert bounds.places.dtype == torch.int32
    assert bounds.longest == 6
    rows = Batch(ids, ids, None).bounds
    assert (rows.places.tolist(), rows.longest) == ([0, 6, 12], 6)


def test_bounds_of_shorter_sequences_are_theirs() -> None:
    ids = torch.zeros(1, 6, dtype=torch.int64)
    pieces = Batch(ids, ids, torch.tensor([[0, 1, 0, 1, 2, 3]])).cut(2)
    assert pieces.bounds.places.tolist() == [0, 2, 3, 6]
    assert pieces.bounds.longest == 3


def test_only_attention_without_a_mask_is_given_bounds() -> None:
    ids, cpu = torch.zeros(1, 4, dtype=torch.int64), torch.device("cpu")
    batch = Batch(ids, ids, None)
    assert batch.keywords("sdpa", cpu) == batch.keywords("eager", cpu) == {}
    for attention in ("varlen", "flash_attention_2"):
        keywords = batch.keywords(attention, cpu)
        assert keywords["cu_seq_lens_q"] is keywords["cu_seq_lens_k"]
        assert keywords["max_length_q"] == keywords["max_length_k"] == 4
