"""The batch script's questions: the run folder, and whether the job continues."""

import json
from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.tables import beside
from tools import batch_job

TABLES = beside(__file__, "batch_job.toml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a run config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text('[run]\ndir = "from the file"\n')
    (tmp_path / "torn.toml").write_text("[run\n")
    (tmp_path / "other.toml").write_text("run = 3\n")
    return tmp_path


@pytest.mark.parametrize(("words", "answer"), TABLES["folders"])
def test_the_run_folder_is_where_train_puts_it(
    folder: Path,
    words: str,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert batch_job.main(["run-dir", *words.split()]) == 0
    assert capsys.readouterr().out == f"{answer.format(here=folder)}\n"


def run_of(folder: Path, attempt: int, code: int | None, hung: int | None = None) -> RunFolder:
    """Return a run folder as an attempt left it, and the report of attempt `hung`, if any."""
    run = RunFolder(folder / "run")
    run.heartbeats_dir.mkdir(parents=True)
    run.status_path.write_text(json.dumps({"attempt": attempt, "code": code, "step": 3}))
    if hung is not None:
        run.hang_path(hung).write_text("{}")
    return run


@pytest.mark.parametrize(
    ("code", "warned", "recorded", "hung", "expected"), beside(__file__, "batch_job.toml")["codes"]
)
def test_the_code_that_says_most_is_the_jobs(
    tmp_path: Path, code: int, warned: bool, recorded: int | None, hung: int | None, expected: int
) -> None:
    run = run_of(tmp_path, 2, recorded, hung)
    assert batch_job.final_code("train.py", code, run, 1, warned) == expected


@pytest.mark.parametrize(("script", "code", "warned", "expected"), TABLES["attempts"])
def test_records_of_an_attempt_before_say_nothing(
    tmp_path: Path, script: str, code: int, warned: bool, expected: int
) -> None:
    run = run_of(tmp_path, 2, 78, hung=2)
    assert batch_job.final_code(script, code, run, 2, warned) == expected


@pytest.mark.parametrize("text", ["", "{", None])
def test_a_status_that_cannot_be_read_says_nothing(tmp_path: Path, text: str | None) -> None:
    """Neither does a run folder that is a file: the run reports both."""
    path = tmp_path / "status.json"
    path.write_text(text or "")
    run = RunFolder(path if text is None else tmp_path)
    assert batch_job.read_status(run) == {}


def verdicts(folder: Path, warned: bool, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the answers after six equal ends."""
    words = ["verdict", "train.py", "1", str(folder / "run"), "0", *["--warned"] * warned]
    for _ in range(6):
        assert batch_job.main(words) == (75 if warned else 1)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("warned", "left_s", "requeues"), TABLES["requeues"])
def test_job_without_progress_is_requeued_three_times(
    tmp_path: Path,
    warned: bool,
    left_s: float | None,
    requeues: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(batch_job, "slurm_seconds_left", lambda: left_s)
    answers = ["requeue"] * requeues + [""] * (6 - requeues)
    assert verdicts(tmp_path, warned, capsys) == answers
    if requeues < 6:  # with a newer checkpoint, the count restarts
        (tmp_path / "run/checkpoints/step-00000080").mkdir(parents=True)
        assert verdicts(tmp_path, warned, capsys) == answers


@pytest.mark.parametrize(("code", "is_pruned", "answer"), TABLES["ends"])
def test_finished_runs_and_pruned_trials_are_not_requeued(
    tmp_path: Path, code: int, is_pruned: bool, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 2, None)
    if is_pruned:
        (run.path / batch_job.PRUNED).touch()
    assert batch_job.main(["verdict", "train.py", str(code), str(run.path), "1"]) == code
    assert capsys.readouterr().out == f"{answer}\n"


def test_end_names_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, 2, None)  # its step, 3, is that of the start
    for name in ("step-00000008", "step-00000080", ".unfinished-step-00000088"):
        (run.checkpoints_dir / name).mkdir(parents=True)
    batch_job.main(["verdict", "train.py", "137", str(run.path), "1"])
    ended = "train.py ended with 137; newest checkpoint: step-00000080\n"
    assert capsys.readouterr().err.endswith(ended)


def test_uncounted_job_is_not_requeued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run/endings").mkdir(parents=True)
    assert batch_job.main(["verdict", "train.py", "1", str(tmp_path / "run"), "0"]) == 1
    said = capsys.readouterr()
    assert said.out == "\n"
    assert "Is a directory: " in said.err
