"""Copies for saves in the background, in memory that stands for an accelerator's pinned buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoint.index import Fragment
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.checkpoint.tensor_file import HostCopies, pinned_bytes
from harness.layout.box import Part
from tests.checkpoint.small import fragments, manifest, save


class Buffers:
    """Counts buffers and waits, and remembers the last buffer."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.waits = 0

    def new(self, count: int) -> torch.Tensor:
        self.sizes.append(count)
        self.last = torch.full((count,), 255, dtype=torch.uint8)
        return self.last

    def wait(self) -> None:
        self.waits += 1

    def copies(self) -> HostCopies:
        return HostCopies(lambda tensor: tensor.numel() != 1, self.new, self.wait)


def test_a_copy_does_not_follow_the_live_memory() -> None:
    live = torch.zeros(3)
    (copy,) = HostCopies().of([Fragment("w", Part.of((3,)), 0, {"weight": live})])
    live += 1
    assert torch.equal(copy.tensors["weight"], torch.zeros(3))


def test_what_is_on_the_host_takes_no_buffer_and_no_wait() -> None:
    buffers = Buffers()
    HostCopies(buffer_of=buffers.new, wait=buffers.wait).of(fragments())
    assert (buffers.sizes, buffers.waits) == ([], 0)


def test_all_copies_of_a_save_wait_once_in_a_buffer_that_is_kept() -> None:
    buffers = Buffers()
    copies = buffers.copies()
    for seed in (0, 1):
        live = fragments(seed)
        made = copies.of(live)
        assert [(f.name, f.part, f.offset) for f in made] == [
            (f.name, f.part, f.offset) for f in live
        ]
        for copy, fragment in zip(made, live, strict=True):
            for kind, tensor in fragment.tensors.items():
                assert torch.equal(copy.tensors[kind], tensor)
                storage = copy.tensors[kind].untyped_storage().data_ptr()
                in_buffer = storage == buffers.last.untyped_storage().data_ptr()
                assert in_buffer is (tensor.numel() != 1)
                assert storage != tensor.untyped_storage().data_ptr()
        assert buffers.waits == seed + 1
    assert len(buffers.sizes) == 1
    copies.of([Fragment("w", Part.of((9999,)), 0, {"weight": torch.zeros(9999)})])
    assert len(buffers.sizes) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64])
def test_every_dtype_lies_where_it_can_be_read(dtype: torch.dtype) -> None:
    tensors = {kind: torch.arange(n).to(dtype) for kind, n in (("weight", 3), ("exp_avg", 5))}
    (copy,) = Buffers().copies().of([Fragment("w", Part.of((5,)), 0, tensors)])
    for kind, tensor in tensors.items():
        assert torch.equal(copy.tensors[kind], tensor)


def test_files_from_the_buffer_are_those_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    expected = save(tmp_path / "foreground", 1)
    saver = Saver(Store(tmp_path / "background"), 0, Retention())
    saver.copies = Buffers().copies()
    probe = {"input_ids": torch.arange(4).view(1, 4), "labels": torch.full((1, 4), -100)}
    live = fragments(1)
    saver.start(manifest(1), live, probe, background=True)
    for fragment in live:  # the next step, while this one is written
        for tensor in fragment.tensors.values():
            tensor.zero_()
    saved = saver.finish()
    assert saved is not None
    for path in expected.path.iterdir():
        assert (saved.path / path.name).read_bytes() == path.read_bytes(), path.name


def test_memory_that_cannot_be_pinned_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: int, pin_memory: bool = False, **kwargs: torch.dtype) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    assert pinned_bytes(5).shape == (5,)
