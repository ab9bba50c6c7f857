"""Fragments on disk: what is written is what safetensors reads, in any pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoint import tensor_file
from harness.checkpoint.index import Fragment, Index, to_index
from harness.checkpoint.reader import Reader
from harness.checkpoint.tensor_file import write_fragments
from harness.errors import Unusable
from harness.layout.box import Part
from tests.checkpoint.small import fragments, weights


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
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    _, entries = write_fragments(tmp_path, 0, [Fragment("b", Part.of((5,)), 0, {"buffer": tensor})])
    assert torch.equal(Reader(tmp_path, Index(to_index(entries))).whole("b", "buffer"), tensor)


def test_large_fragments_are_cut_into_files_of_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
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
def test_shares_are_the_whole_once(shares: int) -> None:
    fragment = Fragment("w", Part.of((13,)), 0, {"weight": torch.arange(13)})
    parts = [fragment.share(index, shares) for index in range(shares)]
    joined = torch.cat([part.tensors["weight"] for part in parts if part is not None])
    assert torch.equal(joined, torch.arange(13))
    offsets = [part.offset for part in parts if part is not None]
    assert offsets == [int(part.tensors["weight"][0]) for part in parts if part is not None]
