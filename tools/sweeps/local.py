"""Trials on this machine, some at a time, each on GPUs or threads of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.launch import ranks as cpu_ranks
from harness.launch.ranks import REPOSITORY, Ranks
from harness.layout.world import find_accelerator, listed_gpus, published_gpus
from harness.runfolder import RunFolder
from tools.sweeps.cost import Budget
from tools.sweeps.running import Running, last_lines
from tools.sweeps.spec import Sweep
from tools.sweeps.study import OpenTrial, Record, Study, Used


def lane_problems(sweep: Sweep) -> list[str]:
    """Return why this machine cannot run so many trials at a time."""
    settings = sweep.settings
    needed, gpus = settings.ranks * settings.parallel, _gpus()
    if find_accelerator() == "cpu" or needed <= len(gpus):
        return []
    return [
        f"sweep.ranks {settings.ranks} x sweep.parallel {settings.parallel} are {needed} GPUs, and "
        f"{len(gpus)} are here: set fewer"
    ]


def _gpus() -> list[str]:
    """Return the GPUs that trials may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number, _ in enumerate(published_gpus() or listed_gpus())]


def lane_environment(ranks: int, parallel: int, lane: int) -> dict[str, str | None]:
    """Return the changes of the environment for the trial of a lane."""
    if find_accelerator() == "cpu":
        threads = max(1, (os.cpu_count() or 1) // (ranks * parallel))
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    mine = _gpus()[lane * ranks : (lane + 1) * ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


_POLL_S = 0.05
Say = Callable[[str], None]


class LocalRanks:
    """A trial's ranks, as processes of this machine."""

    def __init__(self, group: Ranks) -> None:
        self._group = group

    def poll(self) -> int | None:
        """Return the first code that is not 0, None while any of them runs."""
        codes = [process.poll() for process in self._group.processes]
        return None if None in codes else next(filter(None, codes), 0)

    def stop(self) -> None:
        """Ask all ranks for a checkpoint and an end."""
        for process in self._group.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """End them at once."""
        self._group.end()

    def goes_on(self, code: int) -> bool:
        """Return False."""
        return False

    def last_lines(self) -> list[str]:
        """Return the end of rank 0's output."""
        return last_lines(self._group.logs[0])


class Queue:
    """Runs what is left of a sweep, `sweep.parallel` trials at a time."""

    def __init__(self, sweep: Sweep, study: Study, budget: Budget, say: Say) -> None:
        self._sweep, self._study, self._budget, self._say = sweep, study, budget, say
        self._running: dict[int, Running] = {}  # by lane, which has GPUs of its own
        self._left = [record.number for record in study.records() if not record.has_ended]
        self.is_stopped = False
        """Set it to stop: trials save and end."""

    def run(self, show: Callable[[list[Running]], None], ended: Callable[[Record], None]) -> None:
        """Run trials until none is left, the budget is used up, or the sweep is stopped.

        `show`: called often with those that run; `ended`: with every one that has ended.
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
                time.sleep(_POLL_S)
        finally:
            for running in self._running.values():
                running.processes.end()
                running.trial.note(running.used)

    def _must_stop(self) -> bool:
        if self.is_stopped:
            return True
        over = self._budget.is_over(self._study.records(), self._used)
        if over and self._running:
            self._say(over)
        return over is not None

    @property
    def _used(self) -> dict[int, Used]:
        """Return the steps, tokens and hours of the trials that run."""
        return {running.number: running.used for running in self._running.values()}

    def _start_more(self) -> None:
        lanes = range(self._sweep.settings.parallel)
        while self._left and (free := [lane for lane in lanes if lane not in self._running]):
            number = self._left[0]
            trial = self._study.take(number)
            over = self._budget.is_over(self._study.records(), self._used, trial.choice)
            if over:
                self._study.put_back(number)
                self._say(over)
                self._left = []
                return
            del self._left[0]
            self._running[free[0]] = self._started(trial, free[0])

    def _started(self, trial: OpenTrial, lane: int) -> Running:
        folder = RunFolder(self._sweep.folder_of(trial.number))
        command = self._sweep.command(trial.choice, folder.path)
        words = [sys.executable, str(REPOSITORY / "harness" / "train.py"), *command.words()]

        def start() -> LocalRanks:
            ranks = self._sweep.settings.ranks
            env = lane_environment(ranks, self._sweep.settings.parallel, lane)
            logs = folder.path / "logs"
            return LocalRanks(
                cpu_ranks.start(words, ranks, Path.cwd(), logs, env, stop_with_parent=True)
            )

        metric = self._sweep.settings.metric
        return Running(trial, self._budget.cost(trial.choice), folder, metric, start)
