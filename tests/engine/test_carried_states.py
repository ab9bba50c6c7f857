"""Rows whose state is carried on, and rows that begin from zeros; without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.engine.carried import CarriedStates
from harness.layout.world import World
from harness.models.skeleton import hf_config, skeleton
from harness.plan.make import make_plan
from tests.engine.small import run_config
from tests.engine.streams import MODEL

NUMBERS = 2 * 2 * 24


@pytest.fixture
def states(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def of(rank: int = 0, ranks: int = 2, global_batch: int = 8, micro_batch: int = 2) -> Any:
        sizes = {"global_batch": global_batch, "micro_batch": micro_batch, "carry_state": True}
        run = RunConfig.model_validate(run_config(tmp_path, train=sizes))
        plan = make_plan(run, {}, World(rank, ranks, rank, ranks))
        model = skeleton(hf_config(plan.model_config), torch.float32)
        return CarriedStates(plan, model, torch.device("cpu"))

    return of


def batch(windows: list[int], goes_on: bool = True) -> Batch:
    ids = torch.zeros(len(windows), 4, dtype=torch.int64)
    flags = torch.full((len(windows),), goes_on)
    return Batch(ids, ids, None, windows=torch.tensor(windows), goes_on=flags)


def behind(value: float, rows: int = 2) -> Any:
    return SimpleNamespace(after=torch.full((rows, NUMBERS), value))


def begun(states: CarriedStates, number: int, of: Batch) -> list[float]:
    """The first number of the state that each row of a micro-batch begins with."""
    values = states.before(number, of).keywords["carried"].before.flatten(1)
    assert values.shape[1] == NUMBERS
    assert (values == values[:, :1]).all()
    return values[:, 0].tolist()


def test_a_row_goes_on_in_its_own_text_alone(states: Any) -> None:
    own = states()
    assert begun(own, 0, batch([5, 9])) == [0, 0]
    own.keep(0, batch([5, 9]), behind(3.0))
    assert begun(own, 0, batch([6, 10])) == [3, 3]
    assert begun(own, 1, batch([6, 10])) == [0, 0]  # another micro-batch
    assert begun(own, 0, batch([6, 10], goes_on=False)) == [0, 0]  # a document begins
    assert begun(own, 0, batch([5, 12])) == [0, 0]  # an epoch begins; samples were skipped
    assert begun(own, 0, batch([6, 10])) == [3, 3]


def test_a_state_that_is_not_finite_is_none(states: Any) -> None:
    own, spoiled = states(), behind(2.0)
    spoiled.after[1, 50] = torch.inf
    own.keep(0, batch([0, 9]), spoiled)
    assert begun(own, 0, batch([1, 10])) == [2, 0]


def test_checkpoints_keep_them_by_row(states: Any) -> None:
    saved: dict[tuple[str, str], torch.Tensor] = {}
    for rank in range(2):
        own = states(rank)
        for number in range(2):
            windows = [100 * rank + 10 * number, 100 * rank + 10 * number + 1]
            own.keep(number, batch(windows), behind(float(windows[0])))
        for fragment in own.fragments():
            ((kind, tensor),) = fragment.tensors.items()
            whole = saved.setdefault(
                (fragment.name, kind), tensor.new_full((fragment.part.numel,), 77)
            )
            whole[fragment.offset : fragment.offset + tensor.numel()] = tensor

    def fill(name: str, kind: str, offset: int, out: torch.Tensor, part: Any) -> None:
        out.copy_(saved[name, kind][offset : offset + out.numel()])

    def kinds(name: str) -> list[str]:
        return [kind for of, kind in saved if of == name]

    alone = states(ranks=1, micro_batch=4)
    alone.restore(fill, kinds)
    # Micro-batches are dealt to the ranks in turn: rows 0 and 1 are rank 0's, 2 and 3 rank 1's.
    assert begun(alone, 0, batch([1, 2, 101, 102])) == [0, 0, 100, 100]
    assert begun(alone, 1, batch([11, 12, 111, 112])) == [10, 10, 110, 110]
    other = states(ranks=1, global_batch=4, micro_batch=2)  # rows that are not the same ones
    other.keep(0, batch([4, 5]), behind(1.0))
    other.restore(fill, kinds)
    assert begun(other, 0, batch([5, 6])) == [0, 0]
