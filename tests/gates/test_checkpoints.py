"""The round trip of checkpoints: it passes, it catches defects, and it covers its cells."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.checkpoint.index import WEIGHT, Index, to_index
from harness.checkpoint.manifest import Checkpoint, Manifest, TrainState
from harness.checkpoint.reader import Reader
from harness.checkpoint.tensor_file import Fragment, write_fragments
from harness.layout.box import Part
from tests.gates.cell import Trip
from tests.gates.cells import (
    DIVIDED_SIDES,
    DIVIDED_STAGES,
    EXPERT_SIDES,
    PRECISIONS,
    ROW_SIDES,
    SIDES,
    covering_trips,
    sound_sides,
    trip_covers,
    trips,
)
from tests.gates.models import WIDE
from tests.gates.resume import differences
from tests.gates.trajectory import Apart, Trajectory, apart
from tests.real_runs import REPOSITORY
from tests.run_tools import run_tool


def trajectory(*losses: float) -> Trajectory:
    ones = [1.0] * len(losses)
    return Trajectory([*losses], ones, scales=ones)


@pytest.mark.gate("checkpoints")
def test_nothing_is_lost_between_layouts() -> None:
    done = run_tool("check_checkpoints")
    cells = covering_trips()
    same = sum(cell.same for cell in cells)
    assert f"{len(cells)} cells: every tensor equal in {len(cells)}" in done.stdout
    assert f"bit-equal in {same} of {same} on the same layout; 0 differ" in done.stdout


@pytest.mark.gate("checkpoints")
def test_every_planted_defect_is_caught() -> None:
    done = run_tool("check_checkpoints", "--self-test")
    assert "10 defects planted in 10 cells, 0 missed" in done.stdout


def test_the_covering_set_is_small_and_covers_all() -> None:
    chosen = covering_trips()
    assert len(chosen) <= 61
    possible = set().union(*(trip_covers(cell) for cell in trips() if cell.architecture != WIDE))
    assert len(possible) == 118  # with fewer, the set would promise less
    assert set().union(*map(trip_covers, chosen)) == possible


def test_each_layout_is_left_and_reached_in_every_precision() -> None:
    few = {*DIVIDED_STAGES, *EXPERT_SIDES, *ROW_SIDES}  # not combined with all others
    cells = [c for c in covering_trips() if not few & {c.source.layout, c.target.layout}]
    for precision in PRECISIONS:
        sound = {side.rpartition("x")[0] for side in sound_sides(precision)} | {*DIVIDED_SIDES}
        pairs = {(c.source.layout, c.target.layout) for c in cells if c.precision == precision}
        moved = {pair for pair in pairs if pair[0] != pair[1]}
        assert [{*side} for side in zip(*moved, strict=True)] == [sound, sound]
    same = {cell.source.layout for cell in cells if cell.same}
    assert same == {*SIDES, *DIVIDED_SIDES, "zero2_bf16_states"} - {"zeropp"}


def test_the_full_table_has_as_many_cells_as_the_evidence_says() -> None:
    names = {cell.name for cell in trips()}
    assert f"| {len(names)} pairs of layouts" in (REPOSITORY / "docs/evidence.md").read_text()


@pytest.mark.gate("checkpoints")
def test_an_unknown_cell_is_refused_by_name() -> None:
    done = run_tool("check_checkpoints", "--cells", "fp32-llama-zero9x1-zero1x1", code=2)
    assert "no such cell: fp32-llama-zero9x1-zero1x1" in done.stderr


def test_the_same_layout_on_other_ranks_is_another_one() -> None:
    assert Trip.of("fp32", "llama", "zero1x1", "zero1x1").same
    assert not Trip.of("fp32", "llama", "zero1x1", "zero1x2").same


def test_one_bit_of_a_loss_or_no_number_is_a_difference() -> None:
    base = trajectory(3.0, 2.0)
    assert apart(base, base) == Apart(0.0, 0.0)
    for loss, limit in ((2.0 + 2**-40, 0.0), (float("nan"), 1e9)):
        assert apart(trajectory(3.0, loss), base).exceeds(Apart(limit, limit)) == ["loss"]


def test_a_norm_counts_across_layouts_but_where_the_scale_grew() -> None:
    base = replace(trajectory(3.0, 2.0, 1.0), scales=[1.0, 2.0, 2.0])
    for step, counts in enumerate((True, False, True)):
        other = replace(base, norms=[0.5 if i == step else 1.0 for i in range(3)])
        assert apart(other, base).norm == 0.5
        assert (apart(other, base, across=True).norm > 0) == counts


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
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    step: float,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Reader, "of", Held.reader)
    first = held(tmp_path / "first", {WEIGHT: torch.tensor([0.0, 1.0, 2.0, 3.0])})
    problems = differences(first, held(tmp_path / "second", tensors, step), 0, 1)
    assert len(problems) == len(expected)
    assert all(line.startswith(start) for line, start in zip(problems, expected, strict=True))
