"""The parity gate: it passes, and it covers its cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.launch.fork_server import Zygote
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.plan.attention import AttentionNeeds
from tests.gates import check_parity
from tests.gates.models import LEARNED, RECURRENT, learned
from tests.gates.parity import reference
from tests.gates.parity.cells import NVME, all_cells, brief_cells, covering_cells, covers
from tests.gates.parity.compare import LEAST_FALL, judge
from tests.gates.parity.defects import DEFECTS, planted
from tests.gates.parity.measure import Difference, Trajectory, difference, unit_of
from tests.gates.parity.model import PlainModel, Split, Way
from tests.gates.parity.reference import GATE, spreads, train
from tests.run_tools import run_tool

ZERO = Difference(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def trajectory(**changes: object) -> Trajectory:
    values = {
        "losses": [3.0, 2.0],
        "norms": [1.0, 1.0],
        "held_out": 2.0,
        "gradients": {"w": torch.ones(4)},
        "sgd_changes": {"w": torch.ones(4)},
    }
    return Trajectory(**{**values, **changes})


@pytest.mark.slow("nine engines and plain loops of 20 steps")
def test_the_layout_changes_nothing_that_is_learned(
    zygote: Zygote, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check_parity.main(["--brief"], zygote) == 0
    assert f"{len(brief_cells())} cells, 0 differ" in capfd.readouterr().out


@pytest.mark.slow("six engines and plain loops of 20 steps")
def test_three_planted_defects_are_caught(
    zygote: Zygote, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check_parity.main(["--self-test", "--brief"], zygote) == 0
    assert "3 defects planted in 3 cells, 0 missed" in capfd.readouterr().out


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_finds_what_it_replaces(name: str) -> None:
    assert {*DEFECTS[name].cells} <= {*all_cells()}
    with planted(name, World()):
        pass


def half_of(values: Iterable[str], half: int) -> list[str]:
    """Return the first or the second half of the sorted names; each worker takes one."""
    names = sorted(values)
    middle = len(names) // 2
    return names[middle:] if half else names[:middle]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.gate("defects")
def test_every_planted_defect_is_caught(half: int) -> None:
    by_cell = {f"{defect.cells[0].name} {name}": name for name, defect in DEFECTS.items()}
    names = [by_cell[key] for key in half_of(by_cell, half)]
    done = run_tool("check_parity", "--self-test", "--brief", "--defects", *names)
    assert f"{len(names)} defects planted in {len(names)} cells, 0 missed" in done.stdout


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.gate("parity")
def test_no_pair_of_values_changes_what_is_learned(half: int) -> None:
    cells = half_of((cell.name for cell in covering_cells()), half)
    done = run_tool("check_parity", "--cells", *cells)
    assert f"{len(cells)} cells, 0 differ" in done.stdout


def test_the_brief_set_holds_every_stage_precision_and_axis_and_is_small() -> None:
    brief = brief_cells()
    assert set(brief) < set(all_cells())
    assert {cell.ranks for cell in brief} == {2}
    precisions, stages = ("fp32", "bf16", "fp16"), (1, 2, 3)
    assert {(cell.precision, cell.how.stage) for cell in brief} >= {
        *itertools.product(precisions, stages)
    }
    for axis in ("pipeline", "tensor", "sequence", "expert"):
        assert any(getattr(cell.how, axis) > 1 for cell in brief), axis
    assert len(brief) <= 9


def test_the_covering_set_holds_every_pair_that_can_occur() -> None:
    possible = set().union(*(covers(cell) for cell in all_cells() if cell.layout not in NVME))
    assert len(possible) == 292  # with fewer, the set would promise less
    assert set().union(*map(covers, covering_cells())) == possible


def test_the_covering_set_is_small() -> None:
    # Eight of them with divided rows, seven varlen, six with the chunked loss, seven recomputed or
    # reversible, three recurrent, two with approximate attention.
    assert len(covering_cells()) <= 99


def test_all_cells_are_the_full_table() -> None:
    # architectures x layouts x precisions x accumulation x ranks
    flat = 4 * 6 * 3 * 2 * 2
    # three more in one way, two of them not in fp16
    flat += 6 * (3 * 3 - 2)
    flat += 3 * 2  # optimizer states on NVMe
    flat += 1 * 4 * 3 + 2 * 4  # the second copy; bf16 states at two stages, only in bf16
    flat += 2 * 4 * 3  # compiled, at two stages
    # architectures and precisions except two in fp16; (2 and 4 stages) x ZeRO 0 and 1 x
    # accumulation, and two data ranks with two stages
    pipelined = (9 * 3 - 2) * (2 * 2 * 2 + 2)
    # Families of the flat cells with every stage and precision on 2 of 2, 2 of 4 and 4 ranks;
    # twelve more at two stages in two precisions.
    tensor = 4 * 4 * 3 * 3 + 12 * 2 * 2 + 2  # one that drops hidden states
    # Both combined: three families at two stages in every precision, on four ranks with two numbers
    # of micro-batches and on eight; two more in one way.
    divided_stages = 3 * 2 * 3 * 3 + 2 * 3
    # Two mixtures, three stages and precisions, on 2 of 2, 2 of 4 and 4 ranks, and with tensor
    # parallelism; also with sequence parallelism, on eight ranks.
    experts = 2 * 3 * 3 * 4 + 2 + 1
    compiled = 2 * 2 * 3  # tensor and sequence parallelism, at two stages
    # Six ways to recompute: at four stages, at two stages with tensor and sequence parallelism, and
    # in a pipeline, in three precisions; three more families at two stages in two precisions,
    # except two of the mixture's with tiles.
    recomputed = 6 * (4 + 2 * 2 + 1) * 3 + (6 * 3 - 2) * 2 * 2
    recomputed += 3 * (4 * 2 + 2 * 2)  # reversible: two families, tensor and sequence parallelism
    cells = {cell.name for cell in all_cells()}
    # Divided rows of the same at stages 1 to 3, without ZeRO in fp32, and with tensor parallelism
    # at two stages; eight more families at two stages in two precisions; two mixtures with divided
    # experts.
    rows = 4 * 3 * 3 * 3 + 4 + 4 * 2 * 3 + 8 * 2 * 2 + 2 * 2 * 3
    # Four families in their precisions at every stage with one and four micro-batches; two each
    # with pipeline, tensor and sequence parallelism.
    varlen = (4 * 3 - 1) * 4 * 2 + 3 * 2 * 2
    kinds = 5 * 2 * 4  # in two precisions with ZeRO 3, and with three axes
    recurrent = 2 * (6 + 2 + 1) * 3  # LSTM and GRU: as flat, in two stages, recomputed
    # The chunked loss: four families at every stage in every precision, two on two stages, and two
    # with tensor or sequence parallelism; one of them not in fp16.
    chunked = (4 * 3 - 1) * 4 + (2 * 3 - 1) * 2 + 2 * 2 * 2 * 2
    divided = tensor + divided_stages + experts + rows + compiled
    assert (
        len(cells) == flat + pipelined + divided + varlen + chunked + recomputed + recurrent + kinds
    )


@pytest.mark.gate("parity")
def test_an_unknown_defect_is_refused_by_name() -> None:
    done = run_tool("check_parity", "--self-test", "--defects", "no such", code=2)
    assert "no such defect: no such; there are gradients x2" in done.stderr


@pytest.mark.gate("parity")
def test_an_unknown_cell_is_refused_by_name() -> None:
    done = run_tool("check_parity", "--cells", "llama-zero9-fp32-1-1", code=2)
    assert "no such cell: llama-zero9-fp32-1-1" in done.stderr


def test_a_weight_that_is_rounded_to_its_neighbour_is_equal() -> None:
    weights = torch.tensor([1.0, 1.5, 0.3])
    unit = unit_of(weights, torch.zeros(3))
    assert unit.tolist() == pytest.approx([2**-23, 2**-23, 2**-25], rel=1e-6)
    changes = {"sgd_changes": {"w": weights}, "units": {"w": unit}}
    moved = trajectory(sgd_changes={"w": weights + unit})
    assert difference(moved, trajectory(**changes)).sgd_change == 0
    moved = trajectory(sgd_changes={"w": weights + torch.tensor([0, 0, 3]) * unit})
    assert difference(moved, trajectory(**changes)).sgd_change > 0


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
    distance = difference(trajectory(**changes), trajectory())
    assert quantity in distance.exceeds(ZERO.scaled(1e9))


def test_one_parameter_that_is_not_a_number_does_not_hide_behind_others() -> None:
    two = {"w": torch.ones(4), "v": torch.ones(4)}
    for broken in ("w", "v"):
        spoiled = trajectory(gradients={**two, broken: torch.full((4,), torch.nan)})
        assert difference(spoiled, trajectory(gradients=two)).exceeds(ZERO) == ["gradient"]


def test_a_verdict_takes_as_many_orders_as_it_needs_and_is_that_of_all() -> None:
    cell, distance = covering_cells()[0], Difference(2.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    tolerances = [replace(ZERO, initial_loss=allowed) for allowed in (0.5, 2.0, 3.0)]
    for some, failures in ((tolerances, []), (tolerances[:1], ["initial_loss"])):
        rows = [judge(cell, distance, some, whole) for whole in (False, True)]
        assert [row.failures for row in rows] == [failures, failures]
    left = iter(tolerances)
    assert judge(cell, distance, left, whole=False).tolerance == tolerances[1]
    assert [*left] == tolerances[2:]
    assert judge(cell, distance, tolerances, whole=True).tolerance == tolerances[2]


@pytest.mark.gate("parity")
def test_no_spread_is_smaller_than_the_one_before() -> None:
    way = Way("gpt2", "fp32")
    several = [[*vars(spread).values()] for spread in itertools.islice(spreads(way), 3)]
    for before, after in itertools.pairwise(several):
        assert all(a <= b for a, b in zip(before, after, strict=True))


def test_equal_trajectories_do_not_differ() -> None:
    assert difference(trajectory(), trajectory()).exceeds(ZERO) == []


def test_a_late_step_that_is_not_a_number_does_not_hide_behind_early_ones() -> None:
    spoiled = trajectory(losses=[3.0, float("nan")], norms=[1.0, float("nan")])
    assert set(difference(spoiled, trajectory()).exceeds(ZERO)) == {"loss", "norm"}


def test_a_missing_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'v'"):
        difference(trajectory(gradients={"v": torch.ones(4)}), trajectory())


def test_trajectories_survive_the_disk(tmp_path: Path) -> None:
    trajectory().save(tmp_path / "cell")
    assert difference(Trajectory.load(tmp_path / "cell"), trajectory()).exceeds(ZERO) == []


@pytest.mark.parametrize("architecture", [name for name in LEARNED if name not in RECURRENT])
def test_on_a_gpu_models_have_heads_that_fused_kernels_take(architecture: str) -> None:
    config = learned(architecture, "cuda")
    shape = Shape.from_hf(config)
    assert shape.head_dim == 64
    world = World(accelerator="cuda", gpu="h100-80")
    asked = AttentionNeeds(world, "bf16", config, shape, 32, documents=True)
    assert not any("heads" in problem for problem in asked.problems("varlen"))
    assert learned(architecture, "cpu") == LEARNED[architecture]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_plain_loop_of_a_gpu_has_its_models_and_learns(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEARNED, architecture, learned(architecture, "cuda"))
    losses = train(Way(architecture, "fp32"), Split.even(8), task=GATE).losses
    assert min(losses) <= (1 - LEAST_FALL) * losses[0]


def test_kernels_that_differ_the_second_time_widen_no_more_than_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused attention adds atomically on a GPU; on a CPU nothing is computed twice."""
    way, by = Way("llama", "fp32"), reference.Sum("fp32", 2, 1, False)
    _, order = reference.gradients(way, by)
    each, passes = PlainModel.each_micro_batch, []

    def noisy(model: PlainModel, *args: object) -> object:
        passes.append(len(passes))
        for loss, gradients in each(model, *args):
            yield loss, {n: g * (1 + 1e-4 * passes[-1]) for n, g in gradients.items()}

    monkeypatch.setattr(PlainModel, "each_micro_batch", noisy)
    assert reference.gradients(way, by)[1] == order
    passes.clear()
    monkeypatch.setattr(reference, "may_differ", lambda device: True)
    assert reference.gradients(way, by)[1] == pytest.approx(1e-4, rel=0.01)
    assert order < 1e-6
