"""An undisturbed run, trials of a run that faults interrupt, and what must hold afterwards."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.manifest import read_manifest
from harness.launch.fork_server import Zygote
from harness.launch.ranks import Outcome
from harness.runfolder import RunFolder
from tests.real_runs import SHORT_RUN, SMALL_MODEL, events
from tests.shipped import DS_CONFIGS

STEPS, SAVE_EVERY = 8, 2


def arguments(run: Path, data: list[str], *more: str, ds: str = "zero1") -> list[str]:
    """Return the arguments of eight steps with dropout, accumulation and four saves."""
    return [
        *(f"--deepspeed={DS_CONFIGS / ds}.json", *SMALL_MODEL, *SHORT_RUN, *data),
        *(f"train.steps={STEPS}", f"save.every={SAVE_EVERY}", "save.keep=2", "eval.every=3"),
        *("model.dropout=0.1", f"run.dir={run}", *more),
    ]


@dataclass
class Trial:
    """One run on two ranks, started as often as a test needs; `path` may be on another disk."""

    path: Path
    logs: Path
    data: list[str]
    zygote: Zygote

    @property
    def run(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.path)

    def start(
        self, *more: str, code: int = 0, patience_s: float = math.inf, **fault: Any
    ) -> Outcome:
        """Train until all ranks end with `code`; for `fault` see tests/faults/plant.py.

        `patience_s` is how long a rank may outlive one that failed.
        """
        words = arguments(self.path, self.data, *more)
        ended = self.zygote.run(words, self.logs, fault or None, patience_s=patience_s)
        assert ended.codes == [code, code], ended.output
        return ended

    def fill(self, disk: Path, *more: str, **fault: Any) -> Outcome:
        """Train on `disk`, which is full from `fault` on, until all ranks end; then free space."""
        self.path = disk / "run"
        ended = self.start(*more, code=74, do="fill", mount=str(disk), **fault)
        (disk / "filler").unlink()
        return ended

    def hang(
        self, *more: str, fault: dict[str, Any], patience_s: float = math.inf
    ) -> list[int | None]:
        """Return the ranks' exit codes; None for one ended `patience_s` after the other."""
        words = arguments(self.path, self.data, *more)
        return self.zygote.run(words, self.logs, fault, limit_s=40, patience_s=patience_s).codes

    def failed(self, code: int) -> dict[str, Any]:
        """Return the status; assert that it is that of a run that failed with this code."""
        status = self.run.read_status() or {}
        assert (status["outcome"], status["code"]) == ("failed", code)
        return status

    def go_on(self, undisturbed: RunFolder, *more: str, **how: Any) -> None:
        """Train to the end; `check_survived` takes `how`."""
        self.start(*more)
        check_survived(self.run, undisturbed, **how)

    def kill(self, rank: int, at: str, nth: int, *more: str) -> None:
        """Kill `rank` with -9 at a place; assert that the other rank ends too, with an error."""
        fault = {"rank": rank, "at": at, "nth": nth, "do": "kill"}
        ended = self.zygote.run(arguments(self.path, self.data, *more), self.logs, fault)
        assert ended.codes[rank] == -9, ended.output
        assert ended.codes[1 - rank] not in (0, None), ended.output  # None: it hung


@pytest.fixture
def trial(zygote: Zygote, tmp_path: Path, data: list[str]) -> Trial:
    """Return a run that has not been started."""
    return Trial(tmp_path / "run", tmp_path, data, zygote)


@pytest.fixture
def finished(trial: Trial, undisturbed: RunFolder) -> Trial:
    """Return a finished run with checkpoints of steps 8 and 6."""
    shutil.copytree(undisturbed.path, trial.path)
    return trial


@pytest.fixture(scope="package")
def undisturbed(zygote: Zygote, tmp_path_factory, data: list[str]) -> RunFolder:
    folder = tmp_path_factory.mktemp("undisturbed")
    zygote.run(arguments(folder / "run", data), folder).succeeded()
    return RunFolder(folder / "run")


def curve(run: RunFolder) -> list[tuple[Any, ...]]:
    """Return the part of each step's metrics that equals an undisturbed run's."""
    names = ("step", "loss", "grad_norm", "learning_rate", "samples", "eval_loss")
    return [tuple(line.get(name) for name in names) for line in run.read_metrics()]


def executed(run: RunFolder) -> list[int]:
    """Return the executed steps of all attempts, in order."""
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def check_survived(
    run: RunFolder, undisturbed: RunFolder, resumed: bool = True, lost: int = SAVE_EVERY
) -> None:
    """Assert that the second attempt of a run ended tidily on the undisturbed curve, without
    repeating saved steps.

    `lost` is the number of steps that the first may have done after its last save.
    """
    assert curve(run) == curve(undisturbed)
    status = run.read_status() or {}
    assert (status["outcome"], status["attempt"]) == ("done", 2)
    assert len(executed(run)) <= STEPS + lost
    found = events(run, "resumed")
    assert len(found) == resumed
    for event in found:
        assert event["step"] > 0
        assert len(event["manifest"]) == 64
    check_tidy(run)


def check_tidy(run: RunFolder) -> None:
    """Assert that the folder contains only whole checkpoints and a pointer to the newest."""
    folders = sorted(path for path in run.checkpoints_dir.iterdir() if path.is_dir())
    assert [path.name for path in folders if path.name.startswith(".")] == []
    for path in folders:
        read_manifest(path)
    assert (run.checkpoints_dir / "latest").read_text().strip() == folders[-1].name


def newest(run: RunFolder) -> Path:
    return max(run.checkpoints_dir.glob("step-*"))
