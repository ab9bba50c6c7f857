"""Starts ranks and helper processes on this machine, and ends all that they leave: the one launcher
of rehearsals, sweeps, acceptance, benchmarks, gates and tests.

Its processes have their own sessions, so that Ctrl-C only reaches the caller; they end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from harness.files.paths import REPOSITORY

POLL_S = 0.05
PATIENCE_S = 30.0  # for ranks to end after one has failed
ENDING_S = 5.0  # for a rank to end after SIGTERM
# Options of prctl(2).
_SET_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
ON_CPU = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
ON_CUDA = {
    "DS_ACCELERATOR": "cuda",
    "PYTHONWARNINGS": "ignore",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # makes cuBLAS's products deterministic
}


def code_of(pid: int) -> int | None:
    """Return a child's exit code, once, when it has ended (negative for a signal); else None."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


class Forked:
    """The part of subprocess.Popen's interface that a group of ranks needs."""

    def __init__(self, pid: int, code_of: Callable[[int], int | None] = code_of) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code_of = code_of

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal); None while the process runs."""
        if self.returncode is None:
            self.returncode = self._code_of(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process is running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """How ranks ended."""

    codes: list[int | None]
    """Exit codes, negative for a signal; None for a rank that was ended at a limit."""
    outputs: list[str]
    """Stdout and stderr of each rank; empty if output is not captured."""
    seconds: list[float]
    """Duration of each rank."""

    @property
    def output(self) -> str:
        """Output of all ranks."""
        return "\n".join(self.outputs)

    @property
    def last_line(self) -> str:
        """The last line of the output."""
        return self.output.strip().rpartition("\n")[2]

    def succeeded(self) -> Outcome:
        """Return the object itself; fail with all output unless every rank exited with 0."""
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n{self.output}"
        return self


@dataclass(frozen=True)
class Ranks:
    """Processes that run the same command, one per rank."""

    processes: Sequence[subprocess.Popen[bytes] | Forked]
    logs: list[Path]
    """Output file of each process; empty if output is not captured."""
    port: int
    """The rendezvous port, which is also part of the names of shared files."""
    before: frozenset[psutil.Process] | None = None
    """Children of this process that are not the group's; None: `end` ends the ranks alone."""

    @property
    def ended(self) -> bool:
        """True if any of the processes has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait(
        self,
        limit_s: float = float("inf"),
        meanwhile: Callable[[], None] = lambda: None,
        patience_s: float = PATIENCE_S,
    ) -> Outcome:
        """Return how all ranks ended; calls `meanwhile` frequently.

        Ends ranks that outlive `limit_s`, or a failed rank by more than `patience_s`.
        """
        began = now = time.monotonic()
        deadline = began + limit_s
        ends: dict[int, float] = {}
        while None in (codes := [process.poll() for process in self.processes]):  # must poll all
            ends |= {rank: now for rank, code in enumerate(codes) if code is None}
            if any(codes):
                deadline = min(deadline, now + patience_s)
            if now > deadline:
                self.end()
                break
            meanwhile()
            time.sleep(POLL_S)
            now = time.monotonic()
        outputs = [log.read_text(encoding="utf-8", errors="replace") for log in self.logs]
        seconds = [ends.get(rank, began) - began for rank in range(len(codes))]
        return Outcome(codes, outputs, seconds)

    def others(self, patience_s: float = 0.0) -> list[psutil.Process]:
        """Return the processes that ranks started and that run on for `patience_s`, also without
        their ranks. Only for groups of `ending`.
        """
        if self.before is None:
            return []
        own = {process.pid for process in self.processes}
        # An orphan is this process's child. Helpers that were here before may start more meanwhile.
        theirs = {*psutil.Process().children()} - self.before
        for pid in own | {orphan.pid for orphan in theirs}:
            with contextlib.suppress(psutil.NoSuchProcess):
                theirs |= {*psutil.Process(pid).children(recursive=True)}
        theirs = {other for other in theirs if other.pid not in own}
        return list(psutil.wait_procs(theirs, patience_s)[1])

    def end(self) -> None:
        """End the running processes, `others` included: SIGTERM first, SIGKILL later."""
        deadline = time.monotonic() + ENDING_S
        asked: set[int] = set()
        while left := [*(own for own in self.processes if own.poll() is None), *self.others()]:
            is_late = time.monotonic() > deadline
            for process in left:
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    if is_late:
                        process.kill()
                    elif process.pid not in asked:
                        process.terminate()
            asked |= {process.pid for process in left}
            time.sleep(POLL_S)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def place_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, as torchrun sets them."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def environment(*changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with `changes`; None removes a variable."""
    changed: dict[str, str | None] = {**os.environ}
    for values in changes:
        changed |= values
    return {name: value for name, value in changed.items() if value is not None}


def python_path(before: str | None) -> str:
    """Return a PYTHONPATH with this repository first, followed by `before`."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), before]))


def start(
    command: Sequence[str],
    ranks: int | None,
    cwd: Path = REPOSITORY,
    logs: Path | None = None,
    env: Mapping[str, str | None] = ON_CPU,
    if_killed: signal.Signals = signal.SIGKILL,
) -> Ranks:
    """Start `command` once per rank, as torchrun would; None: once, for a helper that is no rank.

    Rank N writes to `logs`/rank-N.log, a helper to `logs`/log.txt; without `logs`, they inherit
    this process's output. `env` overrides this process's environment; None removes a variable.
    The processes get `if_killed` if the thread that starts them ends, for any reason.
    """
    port, parent = free_port(), os.getpid()
    places = [place_of(rank, ranks, port) for rank in range(ranks)] if ranks else [{}]
    names = [f"rank-{rank}.log" for rank in range(ranks)] if ranks else ["log.txt"]
    paths = [logs / name for name in names] if logs else []
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    group = Ranks(processes, paths, port)
    try:
        with deferred(signal.SIGINT, signal.SIGTERM):
            for rank, place in enumerate(places):
                with paths[rank].open("wb") if paths else contextlib.nullcontext() as log:
                    processes.append(
                        subprocess.Popen(
                            command,
                            cwd=cwd,
                            env=environment(place, env),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT if log else None,
                            start_new_session=True,
                            preexec_fn=partial(follow, parent, if_killed),
                        )
                    )
    except BaseException:
        group.end()
        raise
    return group


def follow(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it was killed before the call above
        os._exit(1)


def fork(work: Callable[[], int | None]) -> int:
    """Call `work` in a fork of this process, which ends as an interpreter would and does not
    outlive this one. Return its pid.
    """
    sys.stdout.flush()
    parent, code = os.getpid(), 1
    if pid := os.fork():
        return pid
    try:
        follow(parent)
        code = work() or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(work: Callable[[int], int | None], count: int) -> Ranks:
    """Fork `count` processes: process N calls work(N), and leaves Ctrl-C to this one."""

    def of(number: int) -> int | None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return work(number)

    with deferred(signal.SIGINT, signal.SIGTERM):
        return Ranks([Forked(fork(partial(of, number))) for number in range(count)], [], 0)


@contextlib.contextmanager
def ending(start: Callable[[], Ranks]) -> Iterator[Ranks]:
    """Start a group; neither its ranks nor what they start, in whatever session, outlive the block.

    Nothing else may be started in the block.
    """
    # Orphans of a killed launcher become children of this process, so they can be found.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = frozenset(psutil.Process().children())
    group = replace(start(), before=before)
    try:
        yield group
    finally:
        group.end()


def started(
    command: Sequence[str],
    ranks: int | None,
    cwd: Path = REPOSITORY,
    logs: Path | None = None,
    env: Mapping[str, str | None] = ON_CPU,
) -> contextlib.AbstractContextManager[Ranks]:
    """Start ranks as `start` does, for a block, as `ending` does."""
    return ending(partial(start, command, ranks, cwd, logs, env))


@contextlib.contextmanager
def deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Defer signals until the end of the block: a start must not lose track of a process."""
    if threading.current_thread() is not threading.main_thread():  # only it gets signals
        yield
        return
    come: list[int] = []
    before = {n: signal.signal(n, lambda number, _: come.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught in come:
            signal.raise_signal(caught)
