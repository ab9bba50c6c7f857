"""Fragments on disk, in any pieces; host memory stands in for an accelerator's."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoint import tensor_file
from harness.checkpoint.index import Index, to_index
from harness.checkpoint.reader import Reader
from harness.checkpoint.save import Saved, Saver
from harness.checkpoint.store import Retention, Store
from harness.checkpoint.tensor_file import Fragment, Staging, TensorReader, write_fragments
from harness.errors import Unusable
from harness.layout.box import Part
from tests.checkpoint.small import PROBE, fragments, manifest, save, weights


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    (written,), entries = write_fragments(tmp_path, 3, fragments())
    tensors = load_file(tmp_path / "rank-00003-000.safetensors")
    for name, tensor in weights().items():
        assert torch.equal(tensors[f"{name}@0/weight"], tensor.view(-1))
        assert torch.equal(tensors[f"{name}@0/exp_avg"], 2 * tensor.view(-1))
    data = (tmp_path / written.name).read_bytes()
    assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert [entry.name for entry in entries] == list(weights())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensor_file_round_trips_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    _, entries = write_fragments(tmp_path, 0, [Fragment("b", Part.of((5,)), 0, {"buffer": tensor})])
    assert torch.equal(Reader(tmp_path, Index(to_index(entries))).whole("b", "buffer"), tensor)


def test_large_fragments_are_cut_into_files_of_a_size(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensor_file, "FILE_BYTES", 100)
    written, entries = write_fragments(tmp_path, 0, fragments())
    assert len(written) > 5
    for file in written:
        size = sum(t.nbytes for t in load_file(tmp_path / file.name).values())
        assert size <= 100
    reader = Reader(tmp_path, Index(to_index(entries)))
    for name, tensor in weights().items():
        assert torch.equal(reader.whole(name, "weight"), tensor)


def test_any_range_is_read_from_whatever_pieces(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    pieces = [
        Fragment("w", Part.of((4, 5)), start, {"weight": whole[start:end]})
        for start, end in ((0, 3), (3, 4), (4, 15), (15, 20))
    ]
    _, first = write_fragments(tmp_path, 0, pieces[:2])
    _, second = write_fragments(tmp_path, 1, pieces[2:])
    reader = Reader(tmp_path, Index(to_index([*second, *first])))
    for start in range(20):
        for end in range(start, 21):
            out = torch.full((end - start,), -1.0)
            reader.fill("w", "weight", start, out)
            assert torch.equal(out, whole[start:end])


def test_missing_tensor_error_names_the_tensor(tmp_path: Path) -> None:
    half = Fragment("w", Part.of((8,)), 0, {"weight": torch.zeros(4)})
    _, entries = write_fragments(tmp_path, 0, [half])
    reader = Reader(tmp_path, Index(to_index(entries)))
    with pytest.raises(Unusable, match="has only 2 of elements 2 to 8 of w/weight"):
        reader.fill("w", "weight", 2, torch.zeros(6))
    with pytest.raises(Unusable, match="has only 0 of elements 0 to 3 of other/weight"):
        reader.fill("other", "weight", 0, torch.zeros(3))
    with pytest.raises(Unusable, match="w/exp_avg"):
        reader.fill("w", "exp_avg", 0, torch.zeros(3))


@pytest.mark.parametrize("shares", [1, 2, 3, 5, 16])
def test_reading_shares_of_ranks_cover_a_file_once(shares: int) -> None:
    fragment = Fragment("w", Part.of((13,)), 0, {"weight": torch.arange(13)})
    parts = [fragment.share(index, shares) for index in range(shares)]
    joined = torch.cat([part.tensors["weight"] for part in parts if part is not None])
    assert torch.equal(joined, torch.arange(13))
    offsets = [part.offset for part in parts if part is not None]
    assert offsets == [int(part.tensors["weight"][0]) for part in parts if part is not None]


PART_BYTES = 64


class Device:
    """An accelerator whose memory is the host's: records buffers and waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.log: list[str] = []
        monkeypatch.setattr(tensor_file, "is_remote", lambda tensor: tensor.numel() != 1)
        monkeypatch.setattr(tensor_file, "pinned_bytes", self.pinned)
        monkeypatch.setattr(tensor_file, "_sent", self.sent)
        monkeypatch.setattr(tensor_file, "PART_BYTES", PART_BYTES)
        monkeypatch.setattr(tensor_file, "STAGING", Staging())
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: self.log.append("waited"))

    def pinned(self, count: int) -> torch.Tensor:
        self.sizes.append(count)
        self.last = torch.full((count,), 255, dtype=torch.uint8)
        return self.last

    def sent(self, device: torch.device) -> Callable[[], object]:
        number = sum(entry.startswith("sent") for entry in self.log)
        self.log.append(f"sent {number}")
        return lambda: self.log.append(f"waited for {number}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def contents(saved: Saved) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in saved.path.iterdir()}


def test_save_from_gpu_and_from_cpu_writes_the_same_bytes(tmp_path, monkeypatch) -> None:
    expected = save(tmp_path / "host", 1)
    device = Device(monkeypatch)
    saved = save(tmp_path / "accelerator", 1)
    save(tmp_path / "again", 1)
    assert max(tensor.nbytes for f in fragments(1) for tensor in f.tensors.values()) > PART_BYTES
    assert contents(saved) == contents(expected)
    assert device.sizes == [2 * PART_BYTES]  # one buffer, which is kept


def test_save_hashes_one_buffer_half_while_filling_the_other(device: Device) -> None:
    staging, log = Staging(), []
    parts = staging.on_host(torch.arange(40, dtype=torch.int64))  # five parts
    for number, part in enumerate(parts):
        log.append(f"filled {number}")
        assert part.view(torch.int64).tolist() == [*range(8 * number, 8 * number + 8)]
        staging.used_until(lambda number=number: log.append(f"hashed {number}"))
    assert log == [
        *("filled 0", "filled 1"),
        *("hashed 0", "filled 2", "hashed 1", "filled 3", "hashed 2", "filled 4"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_reads_ahead_while_sending(tmp_path: Path, device: Device, dtype: torch.dtype) -> None:
    values = torch.arange(70, dtype=torch.float32)
    path = tmp_path / "values.safetensors"
    writer = tensor_file.TensorWriter(path, {"x": values})
    writer.write("x", 0, values)
    writer.close()
    out = torch.zeros(66, dtype=dtype)
    TensorReader(path).read("x", 3, out)  # of 16 elements each: five parts
    assert torch.equal(out, values[3:69].to(dtype))
    assert device.sizes == [2 * PART_BYTES]
    assert device.log == [
        *("sent 0", "sent 1"),
        *("waited for 0", "sent 2", "waited for 1", "sent 3", "waited for 2", "sent 4"),
    ]


def test_what_is_on_the_host_takes_no_buffer(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (path,) = tmp_path.rglob("rank-*.safetensors")
    reader = TensorReader(path)
    name = next(iter(reader._stored))
    reader.read(name, 0, torch.empty(reader.shape(name), dtype=torch.float64).view(-1))
    assert tensor_file.STAGING._halves == []


@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64])
def test_copies_follow_no_live_memory_and_wait_only_for_a_device(
    dtype: torch.dtype, is_remote: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "is_remote", lambda tensor: is_remote)
    live = {kind: torch.arange(n).to(dtype) for kind, n in (("weight", 3), ("exp_avg", 5))}
    expected = {kind: tensor.clone() for kind, tensor in live.items()}
    (copy,) = tensor_file.HostCopies().of([Fragment("w", Part.of((5,)), 0, live)])
    for kind, tensor in live.items():
        tensor += 1
        assert torch.equal(copy.tensors[kind], expected[kind])
    assert (len(device.sizes), device.log) == ((1, ["waited"]) if is_remote else (0, []))


def test_all_copies_of_a_save_wait_once_in_a_buffer_that_is_kept(device: Device) -> None:
    copies = tensor_file.HostCopies()
    for seed in (0, 1):
        live = fragments(seed)
        made = copies.of(live)
        for copy, fragment in zip(made, live, strict=True):
            assert replace(copy, tensors={}) == replace(fragment, tensors={})
            for kind, tensor in fragment.tensors.items():
                assert torch.equal(copy.tensors[kind], tensor)
                storage = copy.tensors[kind].untyped_storage().data_ptr()
                in_buffer = storage == device.last.untyped_storage().data_ptr()
                assert in_buffer is (tensor.numel() != 1)
                assert storage != tensor.untyped_storage().data_ptr()
        assert device.log == ["waited"] * (seed + 1)
    assert len(device.sizes) == 1
    copies.of([Fragment("w", Part.of((9999,)), 0, {"weight": torch.zeros(9999)})])
    assert len(device.sizes) == 2


def test_background_and_foreground_save_write_the_same_files(tmp_path, monkeypatch) -> None:
    expected = save(tmp_path / "foreground", 1)
    Device(monkeypatch)
    saver = Saver(Store(tmp_path / "background"), 0, Retention())
    live = fragments(1)
    saver.start(manifest(1), live, PROBE, background=True)
    for fragment in live:  # the next step, during the write
        for tensor in fragment.tensors.values():
            tensor.zero_()
    assert contents(saver.finish()) == contents(expected)


def test_unpinnable_host_memory_falls_back_to_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: int, pin_memory: bool = False, **kwargs: torch.dtype) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    assert tensor_file.pinned_bytes(5).shape == (5,)


def test_wide_elements_come_first_so_that_all_are_aligned() -> None:
    tensors = {"a": torch.empty(3, dtype=torch.bfloat16), "b": torch.empty(2), "c": torch.empty(1)}
    assert tensor_file.header(tensors)[1] == {"b": 0, "c": 8, "a": 12}
