"""Replicas that differ, on three ranks; tests/engine/test_bad_steps.py has an engine."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.engine.api import Replica
from harness.guard.replicas import checksum, checksums, largest_difference, outside_majority
from harness.layout.grid import Grid
from harness.run import saving
from harness.run.saving import _may_drift
from tests.ranks import ranks


def outliers(named: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the ranks outside the majority for each tensor that has any."""
    sums = checksums(named.values(), group, torch.device("cpu"))
    apart = dict(zip(named, map(outside_majority, sums), strict=True))
    return {name: found for name, found in apart.items() if found}


@ranks(3)
def test_the_ranks_outside_the_majority_are_named() -> None:
    rank, draw = dist.get_rank(), torch.Generator().manual_seed(0)
    kinds = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64}
    mine = {name: torch.randn(7, 3, generator=draw).to(kind) for name, kind in kinds.items()}
    assert outliers(mine, None) == {}
    assert outside_majority({0: 1, 1: 2}) == [0, 1], "two ranks have none"
    if rank == 1:
        mine["b"].view(torch.int16)[3, 1] ^= 1
    assert outliers(mine, None) == {"b": [1]}
    if rank == 2:
        mine["b"][0, 0] = -mine["b"][0, 0]
        mine["a"][0, 0] = float("nan")
    assert outliers(mine, None) == {"a": [2], "b": [0, 1, 2]}
    pair = dist.new_group([0, 2])
    assert rank == 1 or outliers(mine, pair) == {"a": [0, 2], "b": [0, 2]}
    assert outliers({}, None) == {}


def test_differing_ranks_of_all_groups_are_joined() -> None:
    found = [saving._Compared(differing={"k": ranks}) for ranks in ([3], [0, 2], [2])]
    assert saving._together(found).differing == {"k": [0, 2, 3]}


@ranks(3)
def test_the_largest_difference_of_copies_is_told() -> None:
    weight = torch.tensor([4.0, 1.0 + dist.get_rank() / 8])
    assert largest_difference(weight, dist.group.WORLD, torch.device("cpu")) == 0.0625
    weight[0] = float("nan")
    assert math.isnan(largest_difference(weight, dist.group.WORLD, torch.device("cpu")))


@ranks(3)
def test_slices_shared_by_tensor_ranks_may_round_apart_on_gpus() -> None:
    rank, grid = dist.get_rank(), Grid(3, tensor=3)
    pair, weight = dist.new_group([0, 1]), torch.tensor([4.0, 1.0 + rank / 2**20])
    replica = Replica("k", weight, (0, 1), pair) if rank < 2 else Replica("k", weight, (2,), None)
    run = mock.Mock(plan=mock.Mock(grid=grid))
    run.engine.replicated.return_value, run.engine.tied.return_value = [replica], []
    run.engine.group_of.return_value, run.engine.device = dist.group.WORLD, torch.device("cpu")

    def compared(device: str) -> tuple[dict[str, float], dict[str, list[int]]]:
        with mock.patch.object(
            saving, "_may_drift", lambda grid, _, *rest: _may_drift(grid, device, *rest)
        ):
            result = saving._compared(run)
        return result.drifted, result.differing

    assert compared("cuda") == (({"k": 2**-22}, {}) if rank < 2 else ({}, {}))
    assert compared("cpu") == ({}, {"k": [0, 1]} if rank < 2 else {})
    weight[0] += rank
    assert compared("cuda") == ({}, {"k": [0, 1]} if rank < 2 else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_replica_checksum_detects_every_single_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    before = checksum(weight)
    for position in range(8 * weight.element_size()):
        flipped = weight.clone()
        flipped.view(bits)[2] ^= torch.tensor(1, dtype=bits) << position
        assert checksum(flipped) != before, position
