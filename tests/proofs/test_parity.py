"""The parity gate: it passes, and it covers what it says."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.run_tools import run_tool
from tools.proofs.models import PRESETS
from tools.proofs.parity.cells import FEW, NVME, Cell, all_cells, covering_cells
from tools.proofs.parity.measure import Difference, Trajectory, difference

ZERO = Difference(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def pairs(cell: Cell) -> set[tuple[tuple[str, object], ...]]:
    values = asdict(cell)
    if cell.layout in FEW:
        kind = "bf16_states" if cell.how.has_bf16_states else cell.layout.partition("_zero")[0]
        return {(("layout", kind),)}
    alone = set()
    if "pipe" in cell.layout or cell.architecture in PRESETS:  # each by each would be 54 cells
        alone = {(("architecture", values.pop("architecture")),)}
    return alone | set(itertools.combinations(values.items(), 2))


def trajectory(**changes: object) -> Trajectory:
    values = {
        "losses": [3.0, 2.0],
        "norms": [1.0, 1.0],
        "held_out": 2.0,
        "gradients": {"w": torch.ones(4)},
        "sgd_changes": {"w": torch.ones(4)},
    }
    return Trajectory(**{**values, **changes})


@pytest.mark.slow
def test_the_layout_changes_nothing_that_is_learned() -> None:
    done = run_tool("proofs/check_parity")
    assert f"{len(covering_cells())} cells, 0 differ" in done.stdout


def test_the_covering_set_holds_every_pair_that_can_occur() -> None:
    every = [cell for cell in all_cells() if cell.layout not in NVME]
    possible = set().union(*map(pairs, every))
    covered = set().union(*(pairs(cell) for cell in covering_cells()))
    assert covered == possible


def test_the_covering_set_is_small() -> None:
    assert len(covering_cells()) <= 45


def test_all_cells_are_the_full_table() -> None:
    # architectures x layouts x precisions x accumulation x ranks
    flat = 4 * 6 * 3 * 2 * 2
    # three more in one way, two of them not in fp16
    flat += 6 * (3 * 3 - 2)
    flat += 3 * 2  # optimizer states on NVMe
    flat += 1 * 4 * 3 + 2 * 4  # the second copy; bf16 states at two stages, in bf16 alone
    flat += 2 * 4 * 3  # compiled, at two stages
    # architectures and precisions but for two in fp16; (2 and 4 stages) x ZeRO 0 and 1 x
    # accumulation, and two data ranks with two stages
    pipelined = (9 * 3 - 2) * (2 * 2 * 2 + 2)
    assert len({cell.name for cell in all_cells()}) == flat + pipelined


def test_an_unknown_cell_is_refused_by_name() -> None:
    done = run_tool("proofs/check_parity", "--cells", "llama-zero9-fp32-1-1", code=2)
    assert "no such cell: llama-zero9-fp32-1-1" in done.stderr


@pytest.mark.parametrize(
    ("changes", "quantity"),
    [
        ({"losses": [float("nan"), 2.0]}, "initial_loss"),
        ({"losses": [3.0, float("nan")]}, "loss"),
        ({"norms": [1.0, float("nan")]}, "norm"),
        ({"held_out": float("nan")}, "held_out"),
        ({"gradients": {"w": torch.full((4,), torch.nan)}}, "gradient"),
        ({"sgd_changes": {"w": torch.full((4,), torch.nan)}}, "sgd_change"),
    ],
)
def test_what_is_not_a_number_is_a_failure(changes: dict[str, object], quantity: str) -> None:
    found = difference(trajectory(**changes), trajectory())
    assert quantity in found.exceeds(ZERO.scaled(1e9))


def test_one_parameter_that_is_not_a_number_does_not_hide_behind_others() -> None:
    two = {"w": torch.ones(4), "v": torch.ones(4)}
    for broken in ("w", "v"):
        found = trajectory(gradients={**two, broken: torch.full((4,), torch.nan)})
        assert difference(found, trajectory(gradients=two)).exceeds(ZERO) == ["gradient"]


def test_equal_trajectories_do_not_differ() -> None:
    assert difference(trajectory(), trajectory()).exceeds(ZERO) == []


def test_a_late_step_that_is_not_a_number_does_not_hide_behind_early_ones() -> None:
    found = trajectory(losses=[3.0, float("nan")], norms=[1.0, float("nan")])
    assert set(difference(found, trajectory()).exceeds(ZERO)) == {"loss", "norm"}


def test_a_missing_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'v'"):
        difference(trajectory(gradients={"v": torch.ones(4)}), trajectory())


def test_trajectories_survive_the_disk(tmp_path: Path) -> None:
    trajectory().save(tmp_path / "cell")
    assert difference(Trajectory.load(tmp_path / "cell"), trajectory()).exceeds(ZERO) == []
