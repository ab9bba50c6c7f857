"""A command with a time limit, of which no process outlives its end."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ENDING_S = 3.0  # how long its processes may take over a SIGTERM
_POLL_S = 0.1
_SET_CHILD_SUBREAPER = 36  # of prctl(2)


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    code: int | None  # a signal's as a negative number; None if it was ended at its limit
    seconds: float
    cpu_s: float  # processor seconds of all its processes


def run_bounded(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `command` in a session of its own until it ends, at most `limit_s`; then end whatever it
    left, sessions of launchers included. Its output goes to `log`; `meanwhile` is called often.
    """
    # Orphans of a launcher that was killed become children of this process, and are seen.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _descendants()
    began, used = time.monotonic(), _cpu_s()
    code = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while (code := process.poll()) is None and time.monotonic() < began + limit_s:
            meanwhile()
            time.sleep(_POLL_S)
    finally:
        _end(before)
    return Ended(code, time.monotonic() - began, _cpu_s() - used)


def _descendants() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def _end(before: set[psutil.Process]) -> None:
    """End the descendants that are new, kindly first; those that they start meanwhile, too."""
    deadline = time.monotonic() + ENDING_S
    asked: set[psutil.Process] = set()
    while left := _descendants() - before:
        late = time.monotonic() > deadline
        for process in left if late else left - asked:
            try:
                process.kill() if late else process.terminate()
            except psutil.NoSuchProcess:
                continue
        asked |= left
        psutil.wait_procs(left, timeout=_POLL_S)


def _cpu_s() -> float:
    """Processor seconds of the processes that this one has waited for."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)
