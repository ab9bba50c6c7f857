"""The round trip of checkpoints: it passes, it catches defects, and it covers its cells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoint.index import WEIGHT, Fragment, Index, to_index
from harness.checkpoint.manifest import Manifest, TrainState
from harness.checkpoint.reader import Reader
from harness.checkpoint.store import Checkpoint
from harness.checkpoint.tensor_file import write_fragments
from harness.layout.box import Part
from tests.gates.checkpoints.cells import (
    DIVIDED,
    DIVIDED_STAGES,
    EXPERTS,
    LAYOUTS,
    PRECISIONS,
    ROWS,
    Cell,
    Side,
    all_cells,
    covering_cells,
    covers,
    sides,
)
from tests.gates.checkpoints.compare import Apart, apart, differences
from tests.gates.models import WIDE
from tests.real_runs import REPOSITORY
from tests.run_tools import run_tool


def trajectory(*losses: float) -> dict[str, list[str]]:
    ones = [(1.0).hex()] * len(losses)
    return {"losses": [loss.hex() for loss in losses], "norms": ones, "scales": ones}


@pytest.mark.gate("checkpoints")
def test_nothing_is_lost_between_layouts() -> None:
    done = run_tool("check_checkpoints")
    cells = covering_cells()
    same = sum(cell.same for cell in cells)
    assert f"{len(cells)} cells: every tensor equal in {len(cells)}" in done.stdout
    assert f"bit-equal in {same} of {same} on the same layout; 0 differ" in done.stdout


@pytest.mark.gate("checkpoints")
def test_every_planted_defect_is_caught() -> None:
    done = run_tool("check_checkpoints", "--self-test")
    assert "10 defects planted, 0 missed" in done.stdout


def test_the_covering_set_is_small_and_covers_all() -> None:
    chosen = covering_cells()
    assert len(chosen) <= 61
    possible = set().union(*(covers(cell) for cell in all_cells() if cell.architecture != WIDE))
    assert len(possible) == 118  # with fewer, the set would promise less
    assert set().union(*map(covers, chosen)) == possible


def test_every_sound_layout_is_left_and_reached_in_every_precision() -> None:
    few = {*DIVIDED_STAGES, *EXPERTS, *ROWS}  # cells that are not combined with all others
    cells = [c for c in covering_cells() if not few & {c.source.layout, c.target.layout}]
    for precision in PRECISIONS:
        sound = {side.layout for side in sides(precision)} | {*DIVIDED}
        moved = [
            cell
            for cell in cells
            if cell.precision == precision and cell.source.layout != cell.target.layout
        ]
        assert {cell.source.layout for cell in moved} == sound
        assert {cell.target.layout for cell in moved} == sound
    same = {cell.source.layout for cell in cells if cell.same}
    assert same == {*LAYOUTS, *DIVIDED, "zero2_bf16_states"} - {"zeropp"}


def test_the_full_table_has_as_many_cells_as_the_evidence_says() -> None:
    names = {cell.name for cell in all_cells()}
    assert f"| {len(names)} pairs of layouts" in (REPOSITORY / "docs/evidence.md").read_text()


@pytest.mark.gate("checkpoints")
def test_an_unknown_cell_is_refused_by_name() -> None:
    done = run_tool("check_checkpoints", "--cells", "fp32-llama-zero9x1-zero1x1", code=2)
    assert "no such cell: fp32-llama-zero9x1-zero1x1" in done.stderr


def test_the_same_layout_on_other_ranks_is_another_one() -> None:
    assert Cell("fp32", "llama", Side("zero1", 1), Side("zero1", 1)).same
    assert not Cell("fp32", "llama", Side("zero1", 1), Side("zero1", 2)).same


def test_one_bit_of_a_loss_or_no_number_is_a_difference() -> None:
    base = trajectory(3.0, 2.0)
    assert apart(base, base) == Apart(0.0, 0.0)
    for loss, limit in ((2.0 + 2**-40, 0.0), (float("nan"), 1e9)):
        assert apart(trajectory(3.0, loss), base).exceeds(Apart(limit, limit)) == ["loss"]


def test_a_norm_counts_across_layouts_but_where_the_scale_grew() -> None:
    base = {**trajectory(3.0, 2.0, 1.0), "scales": ["0x1p+0", "0x1p+1", "0x1p+1"]}
    for step, counts in enumerate((True, False, True)):
        norms = [(0.5 if i == step else 1.0).hex() for i in range(3)]
        assert apart({**base, "norms": norms}, base).norm == 0.5
        assert (apart({**base, "norms": norms}, base, across=True).norm > 0) == counts


class Held(Checkpoint):
    """A checkpoint whose index is not on disk."""

    def reader(self) -> Reader:
        return Reader(self.path, Index(to_index(self.manifest.about["entries"])))


def held(path: Path, tensors: dict[str, torch.Tensor], step: float = 3.0) -> Checkpoint:
    path.mkdir()
    fragments = [Fragment("w", Part.of((2, 2)), 0, tensors)]
    _, entries = write_fragments(path, 0, fragments)
    engine = {"counters": {}, "loss_scaling": {}, "optimizer": {"step": step}}
    manifest = Manifest(TrainState(), "fp32", {}, None, engine, None, None, {"entries": entries})
    return Held(path, manifest)


@pytest.mark.parametrize(
    ("tensors", "step", "expected"),
    [
        ({WEIGHT: torch.tensor([0.0, 1.0, 2.0, 3.0])}, 3.0, []),
        ({WEIGHT: torch.tensor([-0.0, 1.0, 2.0, 3.0])}, 3.0, ["1 bytes of w/weight"]),
        ({WEIGHT: torch.tensor([0, 1, 2, 3]).bfloat16()}, 3.0, ["all of w/weight"]),
        ({"exp_avg": torch.zeros(4)}, 3.0, ["w: "]),
        ({WEIGHT: torch.tensor([0.0, 1.0, 2.0])}, 3.0, ["w: "]),
        ({WEIGHT: torch.tensor([0.0, 1.0, 2.0, 3.0])}, 1.0, ["optimizer.step: 3.0, then 1.0"]),
    ],
)
def test_every_bit_of_a_checkpoint_is_compared(
    tmp_path: Path, tensors: dict[str, torch.Tensor], step: float, expected: list[str]
) -> None:
    first = held(tmp_path / "first", {WEIGHT: torch.tensor([0.0, 1.0, 2.0, 3.0])})
    problems = differences(first, held(tmp_path / "second", tensors, step), 0, 1)
    assert len(problems) == len(expected)
    assert all(line.startswith(start) for line, start in zip(problems, expected, strict=True))
