"""Files match their hashes, and the ranks share the work of checking them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save

from harness.checkpoint import meeting, store
from harness.checkpoint.index import INDEX, WEIGHT, Fragment, to_index
from harness.checkpoint.manifest import MANIFEST, PROBE, Manifest, TrainState
from harness.checkpoint.tensor_file import Written, sha256_of, write_bytes, write_fragments
from harness.errors import Unusable
from harness.layout.box import Part
from tests.thread_ranks import Group

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


def looked_at(folder: Path, ranks: int) -> list[set[str]]:
    """The files that each rank looks up and hashes."""
    group, seen = Group(ranks), [set[str]() for _ in range(ranks)]

    def looks(_: Path, file: Written) -> None:
        seen[group.get_rank()].add(file.name)

    def hashes(path: Path) -> str:
        assert path.name in seen[group.get_rank()]
        return sha256_of(path)

    with (
        mock.patch.object(store, "check_size", looks),
        mock.patch.object(store, "sha256_of", hashes),
    ):
        group.run(lambda rank: store.verified(folder), store, meeting)
    return seen


def test_every_rank_checks_what_it_wrote_and_rank_0_the_index(checkpoint: Path) -> None:
    of_rank_0 = {"rank-00000-000.safetensors", PROBE, INDEX}
    of_rank_1 = {"rank-00001-000.safetensors"}
    assert looked_at(checkpoint, 1) == [of_rank_0 | of_rank_1]
    assert looked_at(checkpoint, 2) == [of_rank_0, of_rank_1]
    assert looked_at(checkpoint, 3) == [of_rank_0, of_rank_1, set()]


def test_what_one_rank_finds_is_a_problem_of_all(checkpoint: Path) -> None:
    (checkpoint / "rank-00001-000.safetensors").unlink()

    def problem(rank: int) -> str:
        with pytest.raises(Unusable) as caught:
            store.verified(checkpoint)
        return str(caught.value)

    problems = Group(3).run(problem, store, meeting)
    assert problems == [f"{checkpoint / 'rank-00001-000.safetensors'} is not there"] * 3


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
        store.verified(checkpoint)
