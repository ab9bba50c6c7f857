"""Runs a command with a time limit; none of its processes outlive it."""

import ctypes
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ENDING_S = 3.0  # time that its processes have to react to SIGTERM
_POLL_S = 0.1
_SET_CHILD_SUBREAPER = 36  # from prctl(2)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # negative for a signal; None if ended at the limit
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
    """Run `command` in its own session for at most `limit_s` seconds, then end all processes that
    it left, including other sessions. Its output goes to `log`; `meanwhile` is called often.
    """
    # Orphans of a killed launcher become children of this process, so they can be found.
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
    """End all new descendants: SIGTERM first, SIGKILL after a deadline. Repeat for those they
    start.
    """
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
    """Return the processor seconds of the child processes that have been waited for."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)
