"""The tensors of a micro-batch, and the prefetch thread."""

import gc
import threading
from unittest import mock

import pytest
import torch

from harness.data.batch import Batch
from harness.data.batches import load_ahead
from tests.real_runs import wait_for


def test_batches_are_copied_to_a_device_from_pinned_memory() -> None:
    """From other memory, the host would wait for the device in each copy."""
    ids = torch.zeros(2, 4, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    whole = Batch(ids, ids, positions, None, *torch.arange(5))  # type: ignore[arg-type]
    pin = mock.Mock(side_effect=torch.clone)
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: pin(tensor)):
        moved = Batch(ids, ids, positions).on(torch.device("meta"))
        assert pin.call_count == 3
        assert repr(whole.pinned()) == repr(whole)
    assert {tensor.device.type for tensor in moved if tensor is not None} == {"meta"}
    assert Batch(ids, ids, None).on(torch.device("cpu"))[0] is ids


def test_bounds_count_documents_over_rows_end_to_end() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    bounds = Batch(ids, ids, positions).bounds
    assert bounds.places.tolist() == [0, 3, 4, 6, 12]
    assert (bounds.places.dtype, bounds.longest) == (torch.int32, 6)
    without = Batch(ids, ids, None).bounds
    assert (without.places.tolist(), without.longest) == ([0, 6, 12], 6)
    pieces = Batch(ids, ids, positions, sources=torch.tensor([3, 5])).cut(2)
    assert (pieces.bounds.places.tolist(), pieces.bounds.longest) == ([0, 3, 4, 6, 9, 12], 3)
    assert pieces.sources.tolist() == [3, 3, 5, 5]  # type: ignore[union-attr]


def test_document_bounds_are_given_only_to_maskless_attention() -> None:
    ids, cpu = torch.zeros(1, 4, dtype=torch.int64), torch.device("cpu")
    batch = Batch(ids, ids, None)
    assert batch.keywords("sdpa", cpu) == batch.keywords("eager", cpu) == {}
    for attention in ("varlen", "flash_attention_2"):
        keywords = batch.keywords(attention, cpu)
        assert keywords["cu_seq_lens_q"] is keywords["cu_seq_lens_k"]
        assert keywords["max_length_q"] == keywords["max_length_k"] == 4


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("load_ahead")]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_prefetch_keeps_order_and_depth(depth: int) -> None:
    loaded: list[int] = []
    items = load_ahead(lambda n: loaded.append(n) or n * n, depth)
    assert [next(items) for _ in range(20)] == [n * n for n in range(20)]
    wait_for(lambda: len(loaded) == 20 + depth, "items ahead")
    items.close()
    wait_for(lambda: not loaders(), "the end of the thread")
    assert loaded == [*range(20 + depth)]


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetch_error_is_raised_at_its_batch(depth: int) -> None:
    def load(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    items = load_ahead(load, depth)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(items)
    wait_for(lambda: not loaders(), "the end of the thread")


@pytest.mark.parametrize("end", ["close", "forget"])
def test_prefetch_thread_ends_when_closed_or_collected(end: str) -> None:
    items = load_ahead(lambda n: n, 2)
    next(items)
    assert loaders()
    if end == "close":
        items.close()
        with pytest.raises(StopIteration):
            next(items)
    del items
    gc.collect()
    wait_for(lambda: not loaders(), "the end of the thread")
