"""Runs trials: several at a time on this machine, or one in the Slurm job of this process.

A trial's processes are watched from outside, through its run folder.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from harness.errors import ConfigError
from harness.files.folder_lock import release, take_lock
from harness.launch.ranks import REPOSITORY, Ranks
from harness.launch.ranks import start as start_ranks
from harness.layout.world import find_accelerator, visible_gpus
from harness.runfolder import RunFolder
from tools.batch_job import PRUNED, read_status
from tools.sweeps.cost import Budget, Cost, Record, Used
from tools.sweeps.slurm import slurm_world
from tools.sweeps.space import Choice
from tools.sweeps.spec import Sweep
from tools.sweeps.study import OpenTrial, Study
from tools.workers import cores

_POLL_S = 0.05
_TASK_POLL_S = 0.2  # longer, since each poll reads the journal, perhaps over a network
_LOG_LINES = 3
_LATEST = 2 / 3  # after this fraction of its run, a trial may finish to get its final metric
_BUSY_S = 600.0  # time limit for a killed sweep's ranks to write their last checkpoint
Say = Callable[[str], None]


Start = Callable[[Choice, Path, int], Ranks]
"""(values, run folder, lane) -> the processes of a trial: its ranks on this machine, or the batch
script in a job of Slurm."""


class Running:
    """A trial and its processes."""

    def __init__(
        self, sweep: Sweep, trial: OpenTrial, cost: Cost, start: Callable[[], Ranks], in_slurm: bool
    ) -> None:
        """Wait until a killed sweep's processes have ended, then start the trial. Raises
        ConfigError if they do not end.
        """
        self.trial, self.cost, self._in_slurm = trial, cost, in_slurm
        self.step, self._tokens = trial.used_before.steps, trial.used_before.tokens
        self.value = math.inf  # the metric when it was last evaluated
        self._metric, self._folder = sweep.settings.metric, RunFolder(sweep.folder_of(trial.number))
        self._why_stopped, self._is_interrupted = "", False
        self._began, self._read = time.monotonic(), 0
        _wait_until_free(self._folder.path / "lock")
        self._folder.path.mkdir(parents=True, exist_ok=True)
        (self._folder.path / PRUNED).unlink(missing_ok=True)
        self._attempt_before = read_status(self._folder).get("attempt", 0)
        self.ranks = start()

    @property
    def used(self) -> Used:
        """Steps, tokens and hours of the trial, earlier attempts included."""
        hours = self.trial.used_before.hours + (time.monotonic() - self._began) / 3600
        return Used(self.step, self._tokens, hours)

    def watch(self) -> bool:
        """Read new metrics, prune, record the end. Return True once its processes have ended."""
        codes = [process.poll() for process in self.ranks.processes]
        for line in self._new_lines():  # read after polling, so that its last lines are included
            self._see(line)
        if None in codes:
            return False
        self._record_end(next(filter(None, codes), 0))
        return True

    def stop(self) -> None:
        """Interrupt the trial: it continues when the sweep does."""
        self._is_interrupted = True
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        """Let all processes save and end, as Slurm's own warning does."""
        for process in self.ranks.processes:
            process.send_signal(signal.SIGUSR1)

    def _see(self, line: dict[str, Any]) -> None:
        self.step, self._tokens = line["step"], line.get("tokens", self._tokens)
        # Lines that a stopped trial still writes are not judged: their number is a matter of luck.
        if self._why_stopped or self._metric not in line or not self.step:
            return
        value = line[self._metric]
        self.value = float(value) if isinstance(value, int | float) else math.inf
        share = min(1.0, self.step / self.cost.steps)
        self.trial.note(self.used)  # other nodes count it in the budget
        gives_up = self.trial.report(share, min(self.value, 1e300))
        if gives_up and share <= _LATEST and not self._why_stopped:
            self._why_stopped = f"stopped after {share:.0%} of its run"
            (self._folder.path / PRUNED).write_text(f"{self._why_stopped} by its sweep\n")
            self._ask_to_end()

    def _record_end(self, code: int) -> None:
        status = read_status(self._folder)
        if status.get("attempt") == self._attempt_before:  # it did not reach its run folder
            status = {}
        outcome, message = status.get("outcome"), status.get("message") or ""
        if outcome == "done":
            self.trial.end("done", self.used, value=self.value)
        elif outcome == "diverged":
            self.trial.end("done", self.used, message, math.inf)
        elif self._why_stopped:
            self.trial.end("pruned", self.used, self._why_stopped)
        elif self._is_interrupted or (self._in_slurm and code == 0):  # it is requeued
            self.trial.note(self.used)
        else:
            reason = f"exit code {code}: {message or self._last_lines()}"
            self.trial.end("failed", self.used, reason)

    def _last_lines(self) -> str:
        try:
            lines = self.ranks.logs[0].read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return " ".join([line.strip() for line in lines if line.strip()][-_LOG_LINES:])

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines of metrics.jsonl that have not been read yet."""
        with suppress(FileNotFoundError), self._folder.metrics_path.open("rb") as file:
            file.seek(self._read)
            while (text := file.readline()).endswith(b"\n"):
                self._read += len(text)
                with suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, dict) and isinstance(line.get("step"), int):
                        yield line


def _wait_until_free(lock: Path) -> None:
    """Wait until the ranks of a killed sweep have saved and ended. Raises ConfigError if they take
    too long.
    """
    deadline = time.monotonic() + _BUSY_S
    while lock.exists():
        try:
            return release(take_lock(lock)[0])
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    return None


class Queue:
    """Runs trials, several at a time, until none is left, the budget is used up or `is_stopped` is
    set.
    """

    # Not by study.optimize, which asks for any waiting trial from a thread for each that runs: a
    # task of Slurm has a number, an interrupted trial goes on later, the budget decides before a
    # trial starts, and the kernel tells ranks of the end of the thread that started them.
    def __init__(
        self, sweep: Sweep, study: Study, say: Say, start: Start, numbers: Sequence[int],
        in_slurm: bool = False,
    ) -> None:  # fmt: skip
        self._in_slurm, self._poll_s = in_slurm, _TASK_POLL_S if in_slurm else _POLL_S
        self._sweep, self._study, self._say, self._start = sweep, study, say, start
        self._budget = Budget(sweep, slurm_world(sweep) if in_slurm else None)
        self._left = [*numbers]
        self._running: dict[int, Running] = {}  # by lane, which has GPUs of its own
        self.is_stopped = False  # set it to stop: trials save and end

    def run(
        self,
        show: Callable[[list[Running]], None] = lambda running: None,
        ended: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """Run the trials. `show` is called often with the running ones, `ended` once for each trial
        when it has ended.
        """
        is_stopping = False
        try:
            while True:
                if not is_stopping and self._must_stop():
                    is_stopping, self._left = True, []
                    for running in self._running.values():
                        running.stop()
                self._start_more()
                if not self._running:
                    return
                for lane, running in [*self._running.items()]:
                    if running.watch():
                        del self._running[lane]
                        ended(self._study.records()[running.trial.number])
                show([*self._running.values()])
                time.sleep(self._poll_s)
        finally:
            for running in self._running.values():
                if self._in_slurm:  # train.sbatch ends its job itself
                    for process in running.ranks.processes:
                        process.terminate()
                else:
                    running.ranks.end()
                running.trial.note(running.used)

    def _must_stop(self) -> bool:
        return self.is_stopped or (bool(self._running or self._left) and self._is_over())

    def _is_over(self, following: OpenTrial | None = None) -> bool:
        """Return True, and say why, if the budget does not allow more, or the `following` trial."""
        used = {running.trial.number: running.used for running in self._running.values()}
        of_next = (following.choice, following.used_before) if following else ()
        over = self._budget.is_over(self._study.records(), used, *of_next)
        if over:
            self._say(over)
        return over is not None

    def _start_more(self) -> None:
        lanes = range(self._sweep.settings.parallel)
        while self._left and (free := [n for n in lanes if n not in self._running]):
            if self._study.give_up(self._left[0]):
                del self._left[0]
                continue
            trial = self._study.take(self._left[0])
            if self._is_over(trial):
                self._study.put_back(trial.number)
                self._left = []
                return
            del self._left[0]
            folder, cost = self._sweep.folder_of(trial.number), self._budget.cost(trial.choice)
            start = partial(self._start, trial.choice, folder, free[0])
            self._running[free[0]] = Running(self._sweep, trial, cost, start, self._in_slurm)


# --- on this machine ---


def queue_here(sweep: Sweep, study: Study, say: Say) -> Queue:
    """Return the queue of the remaining trials, `sweep.parallel` trials at a time."""
    ranks, parallel = sweep.settings.ranks, sweep.settings.parallel

    def start(choice: Choice, folder: Path, lane: int) -> Ranks:
        command = [sys.executable, str(REPOSITORY / "harness" / "train.py")]
        command += sweep.command(choice, folder).words()
        env = _lane_environment(ranks, parallel, lane)
        # A killed sweep's ranks save and end.
        return start_ranks(command, ranks, Path.cwd(), folder / "logs", env, signal.SIGUSR1)

    left = [record.number for record in study.records() if not record.has_ended]
    if sweep.settings.prune:  # the first seed decides whether the others are needed
        left.sort(key=lambda number: (number % len(sweep.seeds), number))
    return Queue(sweep, study, say, start, left)


def _lane_environment(ranks: int, parallel: int, lane: int) -> dict[str, str | None]:
    """Return the environment's changes for the trial of a lane: its threads, or its GPUs."""
    if find_accelerator() == "cpu":
        threads = max(1, cores() // (ranks * parallel))
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[lane * ranks : (lane + 1) * ranks])}


# --- in a job of Slurm ---


def run_task(sweep: Sweep, study: Study, number: int, say: Say) -> int:
    """Run one trial by slurm/train.sbatch in this job; return the job's exit code."""
    if study.records()[number].has_ended:
        say(f"trial {number:03} has ended before")
        return 0
    script, environ = REPOSITORY / "slurm" / "train.sbatch", os.environ
    log = f"slurm-{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}.out"

    def start(choice: Choice, folder: Path, lane: int) -> Ranks:
        words = sweep.command(choice, folder.absolute()).words()
        # In this process's session, by which Slurm knows the job's processes.
        return Ranks([subprocess.Popen(["bash", str(script), *words])], [sweep.folder / log], 0)

    queue = Queue(sweep, study, say, start, [number], in_slurm=True)

    def stop(signal_number: int, frame: FrameType | None) -> None:
        queue.is_stopped = True

    for signal_number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signal_number, stop)
    queue.run()
    return 1 if study.records()[number].state == "failed" else 0
