"""A task of a sweep's Slurm array: one trial, run by slurm/train.sbatch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from harness.launch.ranks import REPOSITORY
from harness.runfolder import RunFolder
from tools.sweeps.cost import Budget
from tools.sweeps.running import Running, last_lines
from tools.sweeps.slurm import slurm_world
from tools.sweeps.spec import Sweep
from tools.sweeps.study import Study

_POLL_S = 0.2
Say = Callable[[str], None]


class BatchScript:
    """A trial as slurm/train.sbatch, in the job of this process."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        script = REPOSITORY / "slurm" / "train.sbatch"
        self._log = log
        self._process = subprocess.Popen(["bash", str(script), *words])

    def poll(self) -> int | None:
        """Return the script's exit code, None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask for a checkpoint and an end, as Slurm's own warning does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """End it as Slurm does."""
        self._process.terminate()

    def goes_on(self, code: int) -> bool:
        """Return True if the script has requeued its job."""
        return code == 0

    def last_lines(self) -> list[str]:
        """Return the end of the job's output."""
        return last_lines(self._log)


def run_task(sweep: Sweep, study: Study, number: int, say: Say) -> int:
    """Run one trial in this job; return the job's exit code."""
    record = study.records()[number]
    if record.has_ended:
        say(f"trial {number:03} has ended before")
        return 0
    budget = Budget(sweep, slurm_world(sweep))
    trial = study.take(number)
    if over := budget.is_over(study.records(), {}, trial.choice):
        study.put_back(number)
        say(over)
        return 0
    folder = RunFolder(sweep.folder_of(number).absolute())
    log = sweep.folder / "slurm-{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}.out".format(**os.environ)
    words = sweep.command(trial.choice, folder.path).words()
    asked: list[int] = []

    def ask(signal_number: int, frame: FrameType | None) -> None:
        asked.append(signal_number)

    for signal_number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signal_number, ask)
    metric = sweep.settings.metric
    running = Running(
        trial, budget.cost(trial.choice), folder, metric, lambda: BatchScript(words, log)
    )
    is_stopped = False
    while not running.watch():
        over = budget.is_over(study.records(), {number: running.used})
        if (asked or over) and not is_stopped:
            is_stopped = True
            if over:
                say(over)
            running.stop()
        time.sleep(_POLL_S)
    return 1 if study.records()[number].state == "failed" else 0
