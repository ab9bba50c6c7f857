"""tools/sweep.py on real runs: early stopping, kills, failures, its page."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

pytest.importorskip("optuna")

from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, wait_for
from tests.sweeps.launched import STEPS, ended, start, write_sweep
from tools.sweeps.cost import Record
from tools.sweeps.ranking import best_of
from tools.sweeps.spec import read_sweep
from tools.sweeps.study import Study

pytestmark = pytest.mark.gate("tools")

RATES = "optim.lr = {from = 1e-4, to = 0.3, log = true, points = 6}"


def records(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    monkeypatch.chdir(path.parent)
    return Study(read_sweep(Path(path.name), [])).records()


def test_pruned_random_sweep_nears_grid_at_a_third(data: list[str], tmp_path, monkeypatch) -> None:
    exhaustive = write_sweep(tmp_path, "grid", "method = 'grid'\nparallel = 2", RATES, data)
    whole = 6 * STEPS
    few = f"trials = 40\nprune = true\nparallel = 2\nbudget.steps = {whole // 3}"
    stopped = write_sweep(tmp_path, "random", few, RATES, data)
    output = ended(start(exhaustive))
    assert f"6 of 6 trials, {whole} steps" in output
    output = ended(start(stopped), code=75)  # the budget ends it
    assert "raise sweep.budget.steps" in output
    by_grid, by_random = (records(path, monkeypatch) for path in (exhaustive, stopped))
    steps = sum(record.used.steps for record in by_random)
    assert whole / 6 < steps < whole / 3 + 4  # a step or two until the stop takes effect
    assert sum(record.state == "pruned" for record in by_random) >= 3
    best_by_grid = best_of(read_sweep(exhaustive, []), by_grid)
    best = best_of(read_sweep(stopped, []), by_random)
    assert best_by_grid
    assert best
    assert best.mean < 1.3 * best_by_grid.mean
    # A rate that is obviously bad is far from that.
    assert max(record.value for record in by_grid) > 1.5 * best_by_grid.mean
    assert f"optim.lr={best.choice['optim.lr']}" in output.splitlines()[-3]
    _page_shows(tmp_path / "runs" / "random" / "sweep.html", by_random)


def _page_shows(path: Path, trials: list[Record]) -> None:
    page = path.read_text()
    ended_ = [record for record in trials if record.has_ended]
    for record in ended_:  # a curve, a line through its values, and a dot
        assert page.count(f"trial {record.number:03}: lr={record.choice['optim.lr']}") == 3
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page)


def test_killed_sweep_finishes_the_same_trials(data: list[str], tmp_path, monkeypatch) -> None:
    settings = "method = 'tpe'\ntrials = 3\nprune = {after = 0.5}"
    undisturbed = write_sweep(tmp_path, "undisturbed", settings, RATES, data)
    disturbed = write_sweep(tmp_path, "disturbed", settings, RATES, data)
    ended(start(undisturbed))
    folder = tmp_path / "runs" / "disturbed"

    process = start(disturbed)
    wait_for(lambda: len(RunFolder(folder / "trial-001").read_metrics()) > 2, "the second trial")
    ranks = psutil.Process(process.pid).children()
    assert ranks
    process.send_signal(signal.SIGKILL)
    ended(process, code=-signal.SIGKILL)
    assert [record.state for record in records(disturbed, monkeypatch)][:2] == ["done", "running"]
    psutil.wait_procs(ranks, timeout=600)  # they end by themselves
    assert not any(rank.is_running() for rank in ranks)

    process = start(disturbed)
    wait_for(lambda: len(RunFolder(folder / "trial-002").read_metrics()) > 2, "the third trial")
    ranks = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    output = ended(process, code=75)
    assert "trials will save and end" in output
    script = REPOSITORY / "tools" / "sweep.py"
    assert f"the same command resumes: python {script} disturbed.toml" in output
    assert not any(rank.is_running() for rank in ranks)

    ended(start(disturbed))
    same, kept = (
        [(record.choice, record.state, record.value) for record in records(path, monkeypatch)]
        for path in (undisturbed, disturbed)
    )
    assert kept == same
    assert (RunFolder(folder / "trial-001").read_status() or {})["attempt"] == 2


def test_a_sweep_goes_on_after_a_trial_that_failed(data: list[str], tmp_path, monkeypatch) -> None:
    corpus = data[0].partition("=")[2]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": null}\n')
    search = f'data.path = ["{bad}", "{corpus}"]'
    path = write_sweep(tmp_path, "failing", "method = 'grid'", search, data[1:])
    output = ended(start(path))
    states = [record.state for record in records(path, monkeypatch)]
    assert states == ["failed", "done"]
    flat = " ".join(output.split())
    assert "trial 000 failed: exit code 2:" in flat
    assert "bad.jsonl" in flat.partition("trial 000 failed")[2]
    bad.write_text(json.dumps({"text": "word " * 4000}) + "\n")
    ended(start(path, "--retry"))
    assert [record.state for record in records(path, monkeypatch)] == ["done", "done"]
