"""The parity gate: it passes, and it covers its cells."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.launch.fork_server import Zygote
from harness.launch.ranks import ON_CPU
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.plan.attention import AttentionNeeds
from tests.gates import check_parity, reference
from tests.gates.cell import Cell, Job
from tests.gates.cells import NVME, brief_cells, covering_cells, covers, parity_cells
from tests.gates.compare import LEAST_FALL, judge
from tests.gates.defects import PARITY, planted
from tests.gates.jobs import run_jobs
from tests.gates.models import LEARNED, RECURRENT, learned
from tests.gates.plain_model import PlainModel, Split, Way
from tests.gates.reference import GATE, spreads, train
from tests.gates.trajectory import Difference, Trajectory, difference, unit_of
from tests.real_runs import REPOSITORY
from tests.run_tools import run_tool
from tools.acceptance.parity import _PAIR

ZERO = Difference(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def trajectory(**changes: object) -> Trajectory:
    values = {"losses": [3.0, 2.0], "norms": [1.0, 1.0], "held_out": 2.0}
    tensors = {name: {"w": torch.ones(4)} for name in ("gradients", "sgd_changes")}
    return Trajectory(**{**values, **tensors, **changes})


@pytest.mark.slow("six engines and plain loops of 8 steps")
def test_the_layout_changes_nothing_that_is_learned(zygote: Zygote, capfd) -> None:
    assert check_parity.main(["--brief"], zygote) == 0
    printed = capfd.readouterr().out
    assert f"{len(brief_cells())} cells, 0 differ" in printed
    assert len(_PAIR.findall(printed)) > 4 * len(brief_cells()), "the acceptance reads them"


@pytest.mark.slow("four engines and plain loops of 8 steps")
def test_two_planted_defects_are_caught(zygote: Zygote, capfd: pytest.CaptureFixture[str]) -> None:
    assert check_parity.main(["--self-test", "--brief"], zygote) == 0
    assert "2 defects planted in 2 cells, 0 missed" in capfd.readouterr().out


@pytest.mark.parametrize("name", PARITY)
def test_a_defect_finds_what_it_replaces(name: str) -> None:
    assert {*PARITY[name].cells} <= {*parity_cells()}
    with planted(name, World()):
        pass


@pytest.mark.gate("defects")
def test_every_planted_defect_is_caught() -> None:
    done = run_tool("check_parity", "--self-test", "--brief", "--defects", *PARITY)
    assert f"{len(PARITY)} defects planted in {len(PARITY)} cells, 0 missed" in done.stdout


@pytest.mark.gate("parity")
def test_no_pair_of_values_changes_what_is_learned() -> None:
    done = run_tool("check_parity")
    assert f"{len(covering_cells())} cells, 0 differ" in done.stdout


def test_brief_cells_hold_each_stage_precision_and_axis() -> None:
    brief = brief_cells()
    assert set(brief) < set(parity_cells())
    assert {cell.ranks for cell in brief} == {2}
    assert {cell.precision for cell in brief} == {"fp32", "bf16", "fp16"}
    assert {cell.how.stage for cell in brief} >= {1, 2, 3}
    for axis in ("pipeline", "tensor", "sequence", "expert"):
        assert any(getattr(cell.how, axis) > 1 for cell in brief), axis
    assert len(brief) <= 6


def test_covering_cells_are_few_and_hold_every_possible_pair() -> None:
    possible = set().union(*(covers(cell) for cell in parity_cells() if cell.layout not in NVME))
    assert len(possible) == 330  # with fewer, the set would promise less
    assert set().union(*map(covers, covering_cells())) == possible
    assert len(covering_cells()) <= 112


def test_the_full_table_has_as_many_cells_as_the_evidence_says() -> None:
    names = {cell.name for cell in parity_cells()}
    assert f"| {len(names):,} cells of model" in (REPOSITORY / "docs/evidence.md").read_text()


@pytest.mark.gate("parity")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--self-test --defects x2", "no such defect: x2; there are the reference of"),
        ("--cells llama-zero9-fp32-1-1", "no such cell: llama-zero9-fp32-1-1"),
    ],
)
def test_an_unknown_name_is_refused(words: str, message: str) -> None:
    assert message in run_tool("check_parity", *words.split(), code=2).stderr


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


def test_a_nan_parameter_is_not_hidden_by_others() -> None:
    two = {"w": torch.ones(4), "v": torch.ones(4)}
    for broken in ("w", "v"):
        spoiled = trajectory(gradients={**two, broken: torch.full((4,), torch.nan)})
        assert difference(spoiled, trajectory(gradients=two)).exceeds(ZERO) == ["gradient"]


def test_verdict_of_few_orders_equals_that_of_all() -> None:
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
def test_the_plain_loop_of_a_gpu_has_its_models_and_learns(architecture: str, monkeypatch) -> None:
    monkeypatch.setitem(LEARNED, architecture, learned(architecture, "cuda"))
    losses = train(Way(architecture, "fp32"), Split.even(8), task=GATE).losses
    assert min(losses) <= (1 - LEAST_FALL) * losses[0]


def test_nondeterministic_kernels_widen_only_by_their_spread(monkeypatch) -> None:
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


def test_jobs_that_lack_a_library_end_before_any_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    jobs = [Job(cell) for cell in parity_cells() if cell.layout in NVME]
    with pytest.raises(SystemExit, match="apt install libaio-dev"):
        run_jobs(jobs, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.gate("parity")
def test_ranks_of_their_own_do_what_forks_do(tmp_path: Path) -> None:
    """As on GPUs, where forks cannot be used."""
    job = Job(Cell("llama", "zero1", "fp32", 4, 1))
    for name, env in (("forked", None), ("own", ON_CPU)):
        out = tmp_path / name
        out.mkdir()
        (out / "llama.config.json").write_text(json.dumps(LEARNED["llama"]))
        run_jobs([job], out, env)
    forked, own = (Trajectory.load(tmp_path / name / job.cell.name) for name in ("forked", "own"))
    assert own.losses == forked.losses
    for file in (tmp_path / "own").glob("llama*.json"):  # the model, and the result
        file.unlink()
    with pytest.raises(SystemExit, match=r"llama\.config\.json"):
        run_jobs([job], tmp_path / "own", ON_CPU)
