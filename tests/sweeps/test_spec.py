"""Files of sweeps: their content, with all mistakes in one report."""

import random
import re
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.files.paths import REPOSITORY
from tests.run_tools import run_tool
from tests.tables import beside
from tools.sweeps.cost import Record, Used, costs
from tools.sweeps.ranking import Setting
from tools.sweeps.slurm import JOB, slurm_world
from tools.sweeps.space import Range, Values, corners, draws, grid, read_space
from tools.sweeps.spec import PruneSection, Sweep, read_sweep
from tools.sweeps.text import best_command

TABLES = beside(__file__, "spec.toml")
SHIPPED = Path(__file__).parents[2] / "docs" / "sweep.toml"


def test_the_shipped_sweep_is_listed_with_its_cost() -> None:
    lines = run_tool("sweep", SHIPPED, "--dry-run").stdout.splitlines()
    assert lines[0].split() == ["trial", "steps", "tokens", "lr"]
    assert len([line for line in lines if re.match(r"\s+\d{3} ", line)]) == 40
    assert "40 trials: 2,400 steps, 1,228,800 tokens if none is stopped early" in lines
    assert "budget: 240 steps" in lines


def test_sweep_problems_are_one_report(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    lines, problems = zip(*TABLES["problems"], strict=True)
    file.write_text("\n".join(lines))
    stderr = run_tool("sweep", file, "--dry-run", code=2).stderr
    for problem in "|".join(problems).split("|"):
        assert problem.format(file=file) in stderr
    assert "command line" not in stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("lines", "parts"), TABLES["mistakes"])
def test_sweep_specific_mistakes_are_reported(lines: str, parts: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.toml").write_text(lines)
    stderr = run_tool("sweep", file, "--dry-run", code=2).stderr
    assert [part for part in parts.split("|") if part not in stderr] == []


def test_ranges_are_even_and_stay_within(tmp_path: Path) -> None:
    assert Range(1.00001e-4, 0.01, log=True, points=3).grid() == ["0.000100001", "0.001", "0.01"]
    assert Range(0, 10, points=5).grid() == ["0", "2", "5", "8", "10"]
    assert Range(1, 3, points=10).grid() == ["1", "2", "3"]
    drawn = [float(Range(1e-4, 1e-2, log=True).draw(random.Random(n))) for n in range(300)]
    assert 1e-4 <= min(drawn) <= max(drawn) <= 1e-2
    assert 120 < sum(value < 1e-3 for value in drawn) < 180


def test_values_are_what_a_user_would_type() -> None:
    problems: list[str] = []
    tree = {"optim": {"name": ["adamw", "true"], "betas": [[0.9, 0.95]]}, "ds.x": [True, 1e-3]}
    space = read_space(tree, False, "ours.toml", problems)
    assert problems == []
    assert space == {
        "optim.name": Values(("adamw", '"true"')),
        "optim.betas": Values(("[0.9, 0.95]",)),
        "ds.x": Values(("true", "0.001")),
    }
    assert len([*grid(space)]) == 4
    assert [*draws(space, 3, seed=1)] == [*draws(space, 9, seed=1)][:3]
    assert {choice["optim.name"] for choice in corners(space)} == {"adamw", '"true"'}


def sweep_of(folder: Path, settings: str, more: str = "") -> Sweep:
    file = folder / "ours.toml"
    file.write_text(f"[sweep]\ntrials = 2\n{settings}\n[search]\noptim.lr = [1e-3]\n{more}")
    return read_sweep(file, [])


def test_a_trial_keeps_no_export_and_no_sample_unless_asked(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "")
    quiet = {"save.export=false", "sample.tokens=0", "data.reservoir=0", "run.dir=a/b"}
    assert quiet <= {*sweep.command({}, Path("a/b")).assignments}
    assert not quiet & {*sweep.command({}).assignments}
    keeping = sweep_of(tmp_path, "", "[data]\nreservoir = 5\n")
    asked = keeping.command({}, tmp_path / "trial").assignments
    assert "data.reservoir=0" not in asked
    assert "data.reservoir=5" in asked


def test_a_trial_needs_a_length(tmp_path: Path) -> None:
    problems: list[str] = []
    more = f"[train]\nsteps = 0\n[data]\neval_path.b = '{REPOSITORY}/docs/course.md'\n"
    costs(sweep_of(tmp_path, "metric = 'eval_loss/b'", more), None, problems)
    assert re.fullmatch("a trial's length must be known and above 0.*", "\n".join(problems))


@pytest.mark.parametrize("written", ["true", "{}", "{after = 0.1, factor = 3}"])
def test_early_stopping_has_defaults(written: str, tmp_path: Path) -> None:
    assert sweep_of(tmp_path, f"prune = {written}").settings.prune == PruneSection()


@pytest.mark.parametrize(("slurm", "ranks"), TABLES["slurm"])
def test_a_trial_on_slurm_is_planned_for_the_gpus_that_it_gets(
    slurm: str, ranks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_RANKS_PER_NODE", "3")
    sweep = sweep_of(tmp_path, f"slurm = {{{slurm}}}")
    if ranks is None:
        with pytest.raises(ConfigError, match=r"sweep.slurm .* use gpus-per-node = 8"):
            slurm_world(sweep)
        return
    world = slurm_world(sweep)
    assert (world.world_size, world.accelerator) == (ranks, "cuda" if "gpu" in slurm else "cpu")


def test_the_best_trial_is_trained_where_the_sweep_ran(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = sweep_of(tmp_path, "slurm = {gres = 'gpu:8'}\nranks = 2")
    best = Setting((Record(0, "done", {"optim.lr": "0.001"}, 3.0, Used(), ""),))
    begin = f"deepspeed --num_accelerators 2 {REPOSITORY}/harness/train.py --deepspeed "
    assert best_command(sweep, best).startswith(begin)
    sweep.folder.mkdir(parents=True)
    (sweep.folder / JOB).write_text("7\n")
    command = best_command(sweep, best)
    assert command.startswith(f"sbatch --gres=gpu:8 {REPOSITORY}/slurm/train.sbatch --deepspeed ")
    assert command.endswith(" optim.lr=0.001")


def test_a_grid_without_end_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    ranges = (f"train.a{n} = {{from = 0, to = 9999, points = 9999}}" for n in range(9))
    lines = "\n".join([*ranges, "optim.lr = {from = 1e-4, to = 1e-2}"])
    file.write_text(f"[sweep]\nmethod = 'grid'\nname = '..'\ntrials = 3\n[search]\n{lines}\n")
    problems: list[str] = []
    read_sweep(file, problems)
    said = ("sweep.name is '..'", "a grid needs", "sweep.trials is 3", "more than 10,000")
    assert [*map(str.count, problems, said)] == [1, 1, 1, 1]
