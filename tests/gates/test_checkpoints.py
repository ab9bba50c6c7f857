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
    assert len(chosen) <= 61  # nine of them with divided experts and rows
    every = [cell for cell in all_cells() if cell.architecture != WIDE]
    assert set().union(*map(covers, chosen)) == set().union(*map(covers, every))


def test_every_sound_layout_is_left_and_reached_in_every_precision() -> None:
    moved = [cell for cell in covering_cells() if cell.source.layout != cell.target.layout]
    for precision in PRECISIONS:
        sound = {side.layout for side in sides(precision)} | {*DIVIDED}
        here = [cell for cell in moved if cell.precision == precision and not apart_from(cell)]
        assert {cell.source.layout for cell in here} == sound
        assert {cell.target.layout for cell in here} == sound
    same = {cell.source.layout for cell in covering_cells() if cell.same and not apart_from(cell)}
    assert same == {*LAYOUTS, *DIVIDED, "zero2_bf16_states"} - {"zeropp"}


def staged(cell: Cell) -> bool:
    return bool({*DIVIDED_STAGES} & {cell.source.layout, cell.target.layout})


def of_experts(cell: Cell) -> bool:
    return bool({*EXPERTS} & {cell.source.layout, cell.target.layout})


def apart_from(cell: Cell) -> bool:
    """Return True for cells that count separately."""
    return (
        staged(cell) or of_experts(cell) or bool({*ROWS} & {cell.source.layout, cell.target.layout})
    )


def test_divided_experts_are_resumed_left_and_reached() -> None:
    cells = [cell for cell in covering_cells() if of_experts(cell)]
    assert {cell.precision for cell in cells} == {*PRECISIONS}
    assert {cell.source.layout for cell in cells if cell.same} == {*EXPERTS}
    assert any(cell.source.layout not in EXPERTS for cell in cells)
    assert any(cell.target.layout not in EXPERTS for cell in cells)


def test_divided_stages_are_resumed_left_for_zero_3_and_reached_from_it() -> None:
    cells = [cell for cell in covering_cells() if staged(cell)]
    assert {cell.precision for cell in cells} == {*PRECISIONS}
    assert any(cell.same for cell in cells)
    assert any(cell.source.layout == "zero3" for cell in cells)
    assert any(cell.target.layout == "zero3" for cell in cells)


def test_all_cells_are_the_full_table() -> None:
    # On one and two ranks; in 16 bits, all on two ranks, and ZeRO 1 and ZeRO 3 on one.
    every = {"fp32": 7 * 2 + 3, "bf16": 10 + 2, "fp16": 7 + 2}
    assert {name: len(sides(name)) for name in PRECISIONS} == every
    divided = 6 * 6 - 4 * 4  # pairs of six sides, at least one of which divides tensors
    expected = sum(n * n + 3 * 8 + n + divided for n in every.values()) + 1 + 2 + 3 * 4
    # Between three sides of divided stages (two in fp16), and between these and four others.
    expected += sum(sides * sides + 2 * 4 * sides for sides in (3, 3, 2))
    # The same for two layouts of divided experts on two and four ranks.
    expected += 3 * (4 * 4 + 2 * 4 * 4)
    expected += 3 * 3  # by number and width: continued, left for ZeRO 3 and reached from it
    # Two layouts of divided rows, and to and from one or two others.
    expected += 3 * (2 + 2 * 3)
    assert len({cell.name for cell in all_cells()}) == expected


@pytest.mark.gate("checkpoints")
def test_an_unknown_cell_is_refused_by_name() -> None:
    done = run_tool("check_checkpoints", "--cells", "fp32-llama-zero9x1-zero1x1", code=2)
    assert "no such cell: fp32-llama-zero9x1-zero1x1" in done.stderr


def test_the_same_layout_on_other_ranks_is_another_one() -> None:
    assert Cell("fp32", "llama", Side("zero1", 1), Side("zero1", 1)).same
    assert not Cell("fp32", "llama", Side("zero1", 1), Side("zero1", 2)).same


def test_one_bit_of_a_loss_is_a_difference() -> None:
    base = trajectory(3.0, 2.0)
    assert apart(base, base) == Apart(0.0, 0.0)
    distance = apart(trajectory(3.0, 2.0 + 2**-40), base)
    assert distance.exceeds(Apart(0.0, 0.0)) == ["loss"]


def test_what_is_no_number_is_a_difference() -> None:
    distance = apart(trajectory(3.0, float("nan")), trajectory(3.0, 2.0))
    assert distance.exceeds(Apart(1e9, 1e9)) == ["loss"]


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
