"""Starts process groups of ranks on this machine, for everything that runs the real engine."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.files.paths import REPOSITORY

POLL_S = 0.05
PATIENCE_S = 30.0  # for ranks to end after one has failed
ENDING_S = 5.0  # for a rank to end after SIGTERM
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
ON_CPU = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
ON_CUDA = {
    "DS_ACCELERATOR": "cuda",
    "PYTHONWARNINGS": "ignore",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # makes cuBLAS's products deterministic
}


class Forked:
    """The part of subprocess.Popen's interface that a group of ranks needs."""

    def __init__(self, pid: int, code_of: Callable[[int], int | None]) -> None:
        """`code_of` returns a process's exit code, once, when it has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._code_of = code_of

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal); None while the process runs."""
        if self.returncode is None:
            self.returncode = self._code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return code

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
class Ranks:
    """Processes that run the same command, one per rank."""

    processes: Sequence[subprocess.Popen[bytes] | Forked]
    logs: list[Path]
    """Output file of each process; empty if output is not captured."""
    port: int
    """The rendezvous port, which is also part of the names of shared files."""

    @property
    def ended(self) -> bool:
        """True if any of the processes has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait(
        self,
        limit_s: float = float("inf"),
        meanwhile: Callable[[], None] = lambda: None,
        patience_s: float = PATIENCE_S,
    ) -> list[int]:
        """Return the exit codes of all ranks, negative for a signal; calls `meanwhile` frequently.

        Ends ranks that outlive `limit_s`, or a failed rank by more than `patience_s`.
        """
        deadline = time.monotonic() + limit_s
        while None in [process.poll() for process in self.processes]:  # must poll all of them
            if any(process.returncode for process in self.processes):
                deadline = min(deadline, time.monotonic() + patience_s)
            if time.monotonic() > deadline:
                self.end()
            meanwhile()
            time.sleep(POLL_S)
        return [process.wait() for process in self.processes]

    def end(self) -> None:
        """End the running processes: SIGTERM first, SIGKILL later."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + ENDING_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
    ranks: int,
    cwd: Path = REPOSITORY,
    logs: Path | None = None,
    env: Mapping[str, str | None] = ON_CPU,
    stop_with_parent: bool = False,
) -> Ranks:
    """Start `command` once per rank, as torchrun would.

    Rank N writes to `logs`/rank-N.log; without `logs`, ranks inherit this process's output. `env`
    overrides this process's environment; None removes a variable. `stop_with_parent`: ranks get
    SIGUSR1, and save, if this process is killed.
    """
    paths = [logs / f"rank-{rank}.log" for rank in range(ranks)] if logs else []
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    group = Ranks(processes, paths, free_port())
    try:
        with _deferred(signal.SIGINT, signal.SIGTERM):
            for rank in range(ranks):
                with paths[rank].open("wb") if paths else contextlib.nullcontext() as log:
                    processes.append(
                        subprocess.Popen(
                            command,
                            cwd=cwd,
                            env=environment(place_of(rank, ranks, group.port), env),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT if log else None,
                            preexec_fn=_stop_with_parent if stop_with_parent else None,
                        )
                    )
    except BaseException:
        group.end()
        raise
    return group


def _stop_with_parent() -> None:
    """Request SIGUSR1 from the kernel when the parent process ends for any reason."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGUSR1), 0, 0, 0)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    ranks: int,
    cwd: Path = REPOSITORY,
    logs: Path | None = None,
    env: Mapping[str, str | None] = ON_CPU,
) -> Iterator[Ranks]:
    """Start ranks as `start` does; none of them outlives the block."""
    group = start(command, ranks, cwd, logs, env)
    try:
        yield group
    finally:
        group.end()


@contextlib.contextmanager
def _deferred(*numbers: signal.Signals) -> Iterator[None]:
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


def run_module(
    module: str,
    arguments: list[str],
    ranks: int,
    errors: Path,
    env: Mapping[str, str | None] = ON_CPU,
) -> None:
    """Run `python -m module` once per rank and wait for all; Ctrl-C ends them.

    If a rank fails, raises SystemExit with the contents of `errors`/*.error.
    """
    for stale in errors.glob("*.error"):
        stale.unlink()
    with started([sys.executable, "-m", module, *arguments], ranks, env=env) as group:
        raise_errors(group.wait(), errors)


def raise_errors(codes: Sequence[int | None], errors: Path) -> None:
    """Raise SystemExit with the contents of `errors`/*.error if any exit code is not 0."""
    if any(code != 0 for code in codes):
        texts = [path.read_text() for path in sorted(errors.glob("*.error"))]
        raise SystemExit("\n".join(texts) or f"the process group ended with {codes}")
