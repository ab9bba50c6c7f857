"""Files match their hashes, and the ranks share the work of checking them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save

from harness.checkpoint import find
from harness.checkpoint.files import sha256_of, write_bytes, write_fragments
from harness.checkpoint.fragment import WEIGHT, Fragment
from harness.checkpoint.index import INDEX, to_index
from harness.checkpoint.manifest import MANIFEST, PROBE, Manifest, TrainState
from harness.errors import Unusable
from harness.layout.box import Part

RANKS = 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Files in the order in which a save lists them: rank 0's, its probe, rank 1's, the index."""
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    files, entries = [], []
    for rank in range(RANKS):
        tensors = {WEIGHT: torch.arange(3.0) + rank, "exp_avg": torch.ones(3)}
        written, own_entries = write_fragments(
            folder, rank, [Fragment("w", Part.of((6,)), 3 * rank, tensors)]
        )
        files += written
        entries += own_entries
        if rank == 0:
            ids = torch.zeros(1, 2, dtype=torch.int64)
            probe = save({"input_ids": ids, "labels": ids.clone()})
            files.append(write_bytes(folder / PROBE, probe))
    index = json.dumps(to_index(entries)).encode()
    files.append(write_bytes(folder / INDEX, index))
    engine = {"counters": {}, "loss_scaling": {}, "optimizer": {}}
    model = {"model_type": "llama"}
    manifest = Manifest(TrainState(3), "fp32", model, None, engine, None, None, {}, files=files)
    write_bytes(folder / MANIFEST, manifest.to_bytes())
    return folder


def checked_by(rank: int, folder: Path) -> set[str]:
    """The files that one rank of two hashes."""
    seen = []

    def hashed(path: Path) -> str:
        seen.append(path.name)
        return sha256_of(path)

    group = mock.Mock(**{"get_rank.return_value": rank, "get_world_size.return_value": RANKS})
    with mock.patch.object(find, "dist", group), mock.patch.object(find, "sha256_of", hashed):
        group.all_gather_object = lambda told, value: told.__setitem__(rank, value)
        find.verified(folder)
    return set(seen)


def test_every_rank_checks_what_it_wrote_and_the_index(checkpoint: Path) -> None:
    small = {"probe.safetensors", INDEX}
    assert checked_by(0, checkpoint) == {"rank-00000-000.safetensors", *small}
    assert checked_by(1, checkpoint) == {"rank-00001-000.safetensors", INDEX}


def test_a_hash_is_that_of_the_file_on_disk(tmp_path: Path) -> None:
    weights = torch.randn(1_000_001)
    (written,), _ = write_fragments(
        tmp_path, 0, [Fragment("w", Part.of((1_000_001,)), 0, {WEIGHT: weights})]
    )
    path = tmp_path / written.name
    assert (written.bytes, written.sha256) == (path.stat().st_size, sha256_of(path))
    assert torch.equal(load_file(path)["w@0/weight"], weights)


def test_one_flipped_bit_is_found(checkpoint: Path) -> None:
    path = checkpoint / "rank-00001-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Unusable, match=r"rank-00001-000\.safetensors is damaged"):
        find.verified(checkpoint)
