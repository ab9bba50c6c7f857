"""Copies that differ, on three ranks without an engine; tests/engine/test_bad_steps.py has one."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from harness.guard.replicas import checksum
from tests.two_ranks import REPOSITORY, run_ranks

THREE_RANKS = """
import json, torch, torch.distributed as dist
from harness.guard.replicas import checksums, largest_difference, outside_majority

dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}

def weights():
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(7, 3, generator=draw).to(kind)
            for name, kind in (("a", torch.float32), ("b", torch.bfloat16), ("c", torch.float64))}

def outliers(named, group):
    names, tensors = zip(*named) if named else ((), ())
    sums = checksums(tensors, group, torch.device("cpu"))
    apart = {name: outside_majority(of_rank) for name, of_rank in zip(names, sums)}
    return {name: ranks for name, ranks in apart.items() if ranks}

mine = weights()
found["equal"] = outliers(mine.items(), None)
if rank == 1:
    mine["b"].view(torch.int16)[3, 1] ^= 1
found["one"] = outliers(mine.items(), None)
if rank == 2:
    mine["b"][0, 0] = -mine["b"][0, 0]
    mine["a"][0, 0] = float("nan")
found["two"] = outliers(mine.items(), None)
pair = dist.new_group([0, 2])
found["pair"] = outliers(mine.items(), pair) if rank != 1 else None
found["none"] = outliers([], None)
weight = torch.tensor([4.0, 1.0 + rank / 8])
found["apart"] = largest_difference(weight, dist.group.WORLD, torch.device("cpu"))
weight[0] = float("nan")
found["not finite"] = largest_difference(weight, dist.group.WORLD, torch.device("cpu"))
if rank == 2:
    print("found", json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def test_the_ranks_outside_the_majority_are_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", THREE_RANKS]
    ended = run_ranks(command, tmp_path, ranks=3, env={"PYTHONPATH": str(REPOSITORY)}).succeeded()
    (line,) = [line for line in ended.outputs[2].splitlines() if line.startswith("found ")]
    results = json.loads(line.removeprefix("found "))
    assert math.isnan(results.pop("not finite"))
    assert results == {
        "equal": {},
        "one": {"b": [1]},
        "two": {"a": [2], "b": [0, 1, 2]},
        "pair": {"a": [0, 2], "b": [0, 2]},
        "none": {},
        "apart": 0.0625,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    weight = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    before = checksum(weight)
    for position in range(8 * weight.element_size()):
        flipped = weight.clone()
        flipped.view(bits)[2] ^= torch.tensor(1, dtype=bits) << position
        assert checksum(flipped) != before, position
