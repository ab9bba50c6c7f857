"""Trials of a sweep in Optuna's journal, without runs: a formula replaces the loss."""

import math
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("optuna")

from harness.errors import ConfigError
from harness.launch.ranks import Ranks
from harness.runfolder import RunFolder
from tests.tables import beside
from tools.sweep import _run_array
from tools.sweeps import cost, running
from tools.sweeps.cost import Budget, Cost, Record, Used, lane_problems
from tools.sweeps.ranking import ranked
from tools.sweeps.running import Queue, Running, _lane_environment, run_task
from tools.sweeps.space import Choice
from tools.sweeps.spec import Sweep, keep_file, read_sweep
from tools.sweeps.study import JOURNAL, OpenTrial, Study, cut_torn_line
from tools.sweeps.text import Screen, listing

_SEARCH = """
[search]
optim.lr = {from = 1e-4, to = 1.0, log = true}
optim.name = ["adamw", "lion"]
train.global_batch = {from = 4, to = 64}
"""


def sweep_of(tmp_path: Path, settings: str, search: str = _SEARCH) -> Sweep:
    path = tmp_path / "ours.toml"
    path.write_text(f"[sweep]\n{settings}\n{search}\n[train]\nsteps = 100\n")
    problems: list[str] = []
    sweep = read_sweep(path, problems)
    assert problems == []
    sweep.folder.mkdir(parents=True, exist_ok=True)
    return sweep


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loss(trial: OpenTrial) -> float:
    name = 0.5 if trial.choice["optim.name"] == "lion" else 0.0
    return abs(math.log10(float(trial.choice["optim.lr"])) + 2) + name


def finish(study: Study, numbers: range) -> None:
    for number in numbers:
        trial = study.take(number)
        trial.end("done", Used(100, 1000, 0.1), value=loss(trial))


def end_at_once(choice: Choice, folder: Path, lane: int) -> Ranks:
    return Ranks([subprocess.Popen(["true"])], [folder / "log"], 0)


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_sweep_that_was_killed_goes_on_with_the_same_trials(method: str, tmp_path: Path) -> None:
    settings = f'method = "{method}"\ntrials = 16\nseed = 7'
    whole = Study(sweep_of(tmp_path, f'{settings}\nname = "whole"'))
    finish(whole, range(16))
    sweep = sweep_of(tmp_path, f'{settings}\nname = "killed"')
    first = Study(sweep)
    finish(first, range(9))
    interrupted = first.take(9)
    interrupted.report(0.5, 3.0)
    again = Study(sweep)
    states = [record.state for record in again.records()]
    assert states == ["done"] * 9 + ["running"] + ["waiting"] * 6
    finish(again, range(9, 16))
    _run_array(sweep, again, Screen())  # nothing is left to be submitted or waited for
    choices = [[record.choice for record in study.records()] for study in (again, whole)]
    assert choices[0] == choices[1]
    other = Study(sweep_of(tmp_path, f'{settings.replace("7", "8")}\nname = "other"'))
    finish(other, range(1))
    assert other.records()[0].choice != whole.records()[0].choice


def test_tpe_learns_from_the_trials_before(tmp_path: Path) -> None:
    study = Study(sweep_of(tmp_path, 'method = "tpe"\ntrials = 30'))
    finish(study, range(30))
    losses = [record.value for record in study.records()]
    assert sum(losses[20:]) / 10 < sum(losses[:10]) / 10 - 0.5


def test_a_third_of_the_trials_goes_on_at_each_share_of_a_run(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "trials = 9\nprune = {after = 0.1, factor = 3}")
    study = Study(sweep)
    trials = [study.take(number) for number in range(9)]
    assert not any(trial.report(0.05, 9.0 - trial.number) for trial in trials)
    # Later ones are better: each is the best when it arrives.
    assert not any(trial.report(0.1, 9.0 - trial.number) for trial in trials)
    late = [Study(sweep).take(number) for number in range(9)]
    stops = [trial.report(0.31, 1.0 + trial.number) for trial in late]
    assert stops == [False, True, True, True, True, True, True, True, True]


@pytest.mark.parametrize("method", ["grid", "random", "tpe"])
def test_seeds_of_a_setting_share_its_values(method: str, tmp_path: Path) -> None:
    """Whichever seed starts first decides, and a sweep that goes on decides the same."""
    trials = "" if method == "grid" else "\ntrials = 6"
    search = "[search]\ntrain.seed = [0, 7]\noptim.name = ['adamw', 'lion', 'sgd']\n"
    search += "optim.lr = {from = 1e-4, to = 1, log = true, points = 2}"
    sweep = sweep_of(tmp_path, f"method = '{method}'{trials}", search)
    assert (sweep.number_of_settings, sweep.number_of_trials) == (6, 12)
    assert "6 settings x 2 seeds = 12 trials: 60 steps" in listing(sweep, [Cost(5, 9, None)] * 12)
    study = Study(sweep)
    for number in (1, 0, 2, 3, 5, 4, *range(6, 12)):
        trial = study.take(number)
        trial.end("done", Used(100, 1000, 0.1), value=loss(trial) + number % 2)
    choices = [record.choice for record in study.records()]
    assert [choice.pop("train.seed") for choice in choices] == ["0", "7"] * 6
    assert choices[0::2] == choices[1::2]
    assert len({*map(str, choices)}) == 6
    settings = ranked(sweep, study.records())
    assert [setting.mean for setting in settings] == sorted(s.mean for s in settings)
    assert {round(setting.deviation, 6) for setting in settings} == {round(math.sqrt(0.5), 6)}


def test_halving_stops_settings_by_their_first_seed(tmp_path: Path) -> None:
    search = "[search]\ntrain.seed = [0, 1]\noptim.lr = [1e-3, 1e-2, 1e-1]"
    settings = "method = 'grid'\nprune = {after = 0.1, factor = 3}"
    sweep = sweep_of(tmp_path, settings, f"{search}\n[eval]\nevery = 10")
    study, start, said = Study(sweep), mock.Mock(side_effect=end_at_once), list[str]()
    first, second = study.take(0), study.take(2)
    assert not first.report(0.1, 1.0)
    assert second.report(0.1, 2.0)
    second.end("pruned", Used(10, 100, 0.1))
    worse = study.take(1)  # of the first setting: its values do not matter
    assert not worse.report(0.1, 9.0)
    running = study.take(3)  # started before its first seed was stopped
    assert running.report(0.1, 0.0)
    Queue(sweep, study, said.append, start, [3, 5, 4]).run()
    assert [[*call.args[0].values()] for call in start.mock_calls] == [["0.1", "1"], ["0.1", "0"]]
    assert study.records()[3].state == "pruned"


def test_failed_trials_wait_again_with_the_same_values(tmp_path: Path) -> None:
    study = Study(sweep_of(tmp_path, "trials = 3"))
    before = [record.choice for record in study.records()]
    study.take(1).end("failed", Used(5, 50, 0.1), "the disk was full")
    study.take(0).end("done", Used(7, 70, 0.1), "the loss is not finite", math.inf)
    assert [record.state for record in study.records()] == ["diverged", "failed", "waiting"]
    assert study.retry() == [1]
    assert [record.state for record in study.records()] == ["diverged", "waiting", "waiting"]
    finish(study, range(1, 2))
    assert [record.choice for record in study.records()] == before


def test_a_queue_that_is_told_to_stop_starts_nothing(tmp_path: Path) -> None:
    starts = mock.Mock(side_effect=AssertionError)
    queue = Queue(sweep := sweep_of(tmp_path, "trials = 2"), Study(sweep), print, starts, range(2))
    queue.is_stopped = True
    queue.run()
    assert not starts.called


def test_a_torn_line_of_the_journal_is_cut(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "trials = 3")
    finish(Study(sweep), range(2))
    journal = sweep.folder / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 5, "wor')
    cut_torn_line(sweep.folder)
    assert journal.read_bytes() == whole
    finish(Study(sweep), range(2, 3))


def test_study_resumes_with_more_trials_but_not_another_search(tmp_path: Path) -> None:
    keep_file(sweep_of(tmp_path, "trials = 3"))
    keep_file(sweep_of(tmp_path, "trials = 5\nbudget = {steps = 10}\nparallel = 2"))
    with pytest.raises(ConfigError) as error:
        keep_file(sweep_of(tmp_path, "trials=5\nseed=1", _SEARCH.replace("1.0, log = true", "2.0")))
    keys = ("sweep.seed", "search.optim.lr.to", "search.optim.lr.log")
    assert all(f"{key} is " in str(error.value) for key in keys)


def test_trials_share_cores_and_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _lane_environment(ranks=2, parallel=2, lane=1) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setattr(running, "find_accelerator", lambda: "cuda")
    monkeypatch.setattr(running, "visible_gpus", lambda: ["2", "3", "6", "7"])
    assert _lane_environment(ranks=2, parallel=2, lane=1) == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize(
    ("accelerator", "gpus", "problems"), [("cuda", 4, 0), ("cuda", 3, 1), ("cpu", 0, 0)]
)
def test_trials_need_gpus_for_all_their_ranks(
    accelerator: str, gpus: int, problems: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "find_accelerator", lambda: accelerator)
    monkeypatch.setattr(cost, "visible_gpus", lambda: [*range(gpus)])
    assert len(lane_problems(sweep_of(tmp_path, "trials = 5\nranks = 2\nparallel = 2"))) == problems


@pytest.mark.parametrize(("every", "is_refused"), [(0, True), (10, False), (100, True)])
def test_pruning_needs_evaluations_during_a_trial(every: int, is_refused: bool, tmp_path) -> None:
    problems: list[str] = []
    settings = "trials = 1\nprune = {after = 0.1, factor = 3}"
    cost.costs(sweep_of(tmp_path, settings, f"{_SEARCH}\n[eval]\nevery = {every}"), None, problems)
    refused = [f"eval.every is {every}, but sweep.prune" in text for text in problems]
    assert refused == [True] * is_refused


def test_trial_starts_if_first_decision_is_within_budget(tmp_path: Path) -> None:
    limits = "trials = 5\nbudget = {steps = 250, hours = 2}"
    whole = sweep_of(tmp_path, limits)
    choice = next(iter(whole.examples()))
    stopped = Record(0, "pruned", choice, 3.0, Used(40, 400, 1.0), "")
    running = Record(1, "running", choice, 3.0, Used(), "")
    both, budget = [stopped, running], Budget(whole, None)
    assert budget.is_over(both, {1: Used(110, 1, 0.5)}, choice) is None
    assert "250 steps is used up" in (budget.is_over(both, {1: Used(111, 1, 0.5)}, choice) or "")
    assert budget.is_over(both, {1: Used(209, 1, 0.5)}) is None
    assert budget.is_over(both, {1: Used(209, 1, 0.5)}, choice, Used(99, 1, 0.5)) is None
    assert "250 steps is used up" in (budget.is_over(both, {1: Used(210, 1, 0.5)}) or "")
    assert "2.0 hours is used up" in (budget.is_over(both, {1: Used(1, 1, 1.0)}) or "")
    early = Budget(sweep_of(tmp_path, f"{limits}\nprune = {{after = 0.2}}"), None)
    assert early.is_over(both, {1: Used(190, 1, 0.5)}, choice) is None
    assert early.is_over(both, {1: Used(191, 1, 0.5)}, choice)


@pytest.mark.parametrize("budget", [200, 199])
def test_a_budget_counts_the_steps_before_an_interruption_once(budget: int, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, f"trials = 2\nbudget = {{steps = {budget}}}")
    study, start, said = Study(sweep), mock.Mock(side_effect=end_at_once), list[str]()
    finish(study, range(1))
    study.take(1).note(Used(50, 500, 0.1))
    Queue(sweep, study, said.append, start, [1]).run()
    assert start.call_count == (budget == 200)
    assert ["used up" in line for line in said] == [True] * (budget == 199)


@pytest.mark.parametrize(("files", "how", "ends"), beside(__file__, "study.toml")["ends"])
def test_a_trial_ends_as_its_run(files: dict[str, str], how: str, ends: object, tmp_path) -> None:
    sweep = sweep_of(tmp_path, "trials = 2\nprune = {after = 0.1, factor = 3}")
    (study := Study(sweep)).take(0).report(0.1, 1.0)
    ranks = Ranks([process := mock.Mock(**{"poll.return_value": 0})], [sweep.path], 0)
    trial = Running(sweep, study.take(1), Cost(100, 1000, None), lambda: ranks, how == "in Slurm")
    for name, text in files.items():
        (sweep.folder_of(1) / name).write_text(text)
    if how == "stopped":
        trial.stop()
    assert trial.watch()
    record, is_told = study.records()[1], process.send_signal.called
    assert [record.state, record.value, record.used.steps, record.used.tokens, is_told] == ends


def test_a_trial_that_failed_without_a_run_names_rank_0_output(tmp_path: Path) -> None:
    sweep, said = sweep_of(tmp_path, "trials = 1"), list[str]()
    study = Study(sweep)
    (before := RunFolder(sweep.folder_of(0))).open()
    before.write_status("done", 0, 4)  # of an earlier attempt
    before.close()

    def start(choice: Choice, folder: Path, lane: int) -> Ranks:
        for rank in (logs := [folder / "rank-0.log", folder / "rank-1.log"]):
            rank.write_text(f"of {rank.stem}\n")
        return Ranks([subprocess.Popen(["false"]) for _ in logs], logs, 0)

    Queue(sweep, study, said.append, start, [0]).run()
    assert study.records()[0].reason == "exit code 1: of rank-0"
    assert run_task(sweep, study, 0, said.append) == 0  # a job of Slurm that was started again
    assert said == ["trial 000 has ended before"]
