"""Starts real multi-rank runs within two seconds by forking a process that has imported everything.

`python -m harness.launch.fork_server FD` reads one job per line, forks its ranks, and replies on
file descriptor FD: for `Zygote.run`, with exit codes, durations, the rendezvous port and processes
left behind; for `Zygote.start`, with the port and the pids, which are then polled one by one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.launch.ranks import (
    ON_CPU,
    REPOSITORY,
    Forked,
    Ranks,
    environment,
    free_port,
    place_of,
    python_path,
)

# Options of prctl(2).
_SET_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """The result of a run's ranks."""

    codes: list[int | None]
    outputs: list[str]
    seconds: list[float]  # duration of each

    @property
    def output(self) -> str:
        """Output of all ranks."""
        return "\n".join(self.outputs)


class Zygote:
    """The process that forks ranks. As a context manager, it is ended on exit."""

    def __init__(self, env: Mapping[str, str | None] = ON_CPU, planter: str = "") -> None:
        """`env` overrides this process's environment; None removes a variable.

        `planter`: a module whose `plant(fault, rank)` is called in each rank of a run with a fault.
        """
        self.ports: list[int] = []  # rendezvous ports, which are in the names of shared files
        self.left: list[str] = []  # processes that outlived their ranks: command (log folder)
        self._planter = planter
        answers, to_answer = os.pipe()
        self._answers = os.fdopen(answers)
        variables = environment(env)
        variables["PYTHONPATH"] = python_path(variables.get("PYTHONPATH"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.launch.fork_server", str(to_answer)],
            cwd=REPOSITORY,
            env=variables,
            stdin=subprocess.PIPE,
            pass_fds=[to_answer],
            text=True,
        )
        os.close(to_answer)

    def run(
        self,
        args: list[str],
        logs: Path | None = None,
        fault: dict[str, Any] | None = None,
        ranks: int = 2,
        limit_s: float = 180,
        *,
        main: str = "harness.train",
        cwd: Path | None = None,
        patience_s: float = math.inf,
    ) -> Outcome:
        """Train with `args` on `ranks` ranks, and wait for all of them.

        `main`: another module whose main(argv) is called. `patience_s`: seconds that ranks may
        outlive one that failed. Without `logs`, ranks inherit this process's output.
        """
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        job = {
            "args": args,
            "ranks": ranks,
            "logs": str(logs) if logs else None,
            "fault": fault,
            "planter": self._planter,
            "limit_s": limit_s,
            "patience_s": patience_s,
            "main": main,
            "cwd": str(cwd) if cwd else None,
        }
        codes, seconds, port, left = self._ask(job)
        self.ports.append(port)
        if None not in codes:  # a killed rank cannot end its compiler
            self.left += [f"{command} ({logs})" for command in left]
        texts = [logs / f"rank-{rank}.log" for rank in range(ranks)] if logs else []
        outputs = [path.read_text(encoding="utf-8", errors="replace") for path in texts]
        return Outcome(codes, outputs, seconds)

    def start(
        self, main: str, args: list[str], ranks: int, cwd: Path, logs: Path, env: dict[str, str]
    ) -> Ranks:
        """Fork `ranks` ranks that call main() of module `main`, without waiting for them.

        `env` is their complete environment except for the rank variables. Variables that modules
        read on import have no effect: the imports are done. If `main` is the path of a script, it
        runs as under the interpreter: with the file `in` of `logs`, if any, as its stdin, and with
        `out` and `err` as its output.
        """
        logs.mkdir(parents=True, exist_ok=True)
        job = {"main": main, "args": args, "ranks": ranks, "cwd": str(cwd), "logs": str(logs)}
        port, pids = self._ask({**job, "env": env, "fault": None})
        processes = [Forked(pid, self._code_of) for pid in pids]
        return Ranks(processes, [logs / f"rank-{rank}.log" for rank in range(ranks)], port)

    def _code_of(self, pid: int) -> int | None:
        code: int | None = self._ask({"poll": pid})
        return code

    def _ask(self, job: dict[str, Any]) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answers.readline())

    def close(self) -> None:
        """End the process; it must have no ranks."""
        assert self._process.stdin
        self._process.stdin.close()
        self._answers.close()
        self._process.wait(30)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # killing it ends its ranks
            self._process.kill()
        self.close()


def main() -> None:
    """Import everything, then serve one job per line."""
    from harness.engine.importing import importing

    with importing():
        import cpuinfo  # type: ignore[import-untyped]
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # imports all of inductor
        import transformers.models.llama.modeling_llama  # noqa: F401

        import harness.engine.build
        import harness.loop  # noqa: F401

    _share_gloo_threads()
    # DeepSpeed calls this twice for every engine with a CPU optimizer, which takes 3 s.
    cpu_info = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: cpu_info
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt children that ranks leave
    gc.collect()
    gc.freeze()  # exclude the imports from searches for tensors
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(_answer(json.loads(line), answers.fileno())), file=answers, flush=True)


def _share_gloo_threads() -> None:
    """Let all gloo groups of a rank share the thread for their connections: it wakes a hundred
    times a second, and ranks that take several jobs make up to thirty groups.
    """
    from torch.distributed import distributed_c10d as c10d

    theirs: Any = c10d.ProcessGroupGloo

    @functools.cache
    def device() -> Any:  # made by the rank: threads do not survive a fork
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        by_name = theirs.create_device
        return by_name(interface=interface) if interface else theirs.create_default_device()

    class Gloo(theirs):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = theirs._Options()
            options._timeout, options._devices = timeout, [device()]
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Gloo  # type: ignore[misc]


def _answer(job: dict[str, Any], to_answer: int) -> Any:
    if "poll" in job:
        ended, status = os.waitpid(job["poll"], os.WNOHANG)
        _started.discard(ended)
        return os.waitstatus_to_exitcode(status) if ended else None
    port = free_port()
    pids = [_fork(rank, port, job, to_answer) for rank in range(job["ranks"])]
    if "limit_s" in job:  # Zygote.run waits for them
        return *_wait(pids, job), port, _left_behind()
    _started.update(pids)
    return port, pids


def _wait(pids: list[int], job: dict[str, Any]) -> tuple[list[int | None], list[float]]:
    """Return the exit codes and seconds of a job's ranks; kill those that exceed its limits."""
    began = time.monotonic()
    deadline = began + job["limit_s"]
    codes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        if failed := [seconds[pid] for pid, code in codes.items() if code]:
            deadline = min(deadline, began + min(failed) + job["patience_s"])
        for pid in {*pids} - {*codes}:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                seconds[pid] = time.monotonic() - began
        time.sleep(0.02)
    for pid in {*pids} - {*codes}:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids], [seconds.get(pid, math.inf) for pid in pids]


_started: set[int] = set()
"""Pids of ranks from `Zygote.start` that have not been waited for."""


def _left_behind() -> list[str]:
    """Kill processes that ranks started and left behind; return their commands."""
    begun = []
    for child in psutil.Process().children():
        if child.pid not in _started:
            with contextlib.suppress(psutil.NoSuchProcess):
                begun += [child, *child.children(recursive=True)]
    _, alive = psutil.wait_procs(begun, timeout=2)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            left.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
            process.wait()
    return left


def _fork(rank: int, port: int, job: dict[str, Any], to_answer: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.close(to_answer)
    is_script, read = job["main"].endswith(".py"), f"{job['logs']}/in"
    if job["logs"]:
        names = ("out", "err") if is_script else (f"rank-{rank}.log",) * 2
        for descriptor, name in enumerate(names, 1):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            os.dup2(os.open(f"{job['logs']}/{name}", flags), descriptor)
    os.dup2(os.open(read if os.path.exists(read) else os.devnull, os.O_RDONLY), 0)  # noqa: PTH110
    if "env" in job:
        os.environ.clear()
        os.environ.update(job["env"])
        tempfile.tempdir = None  # read it from the new environment
    if not is_script:
        os.environ.update(place_of(rank, job["ranks"], port))
    code = 1
    try:
        if job["cwd"]:
            os.chdir(job["cwd"])
        if job["fault"]:
            importlib.import_module(job["planter"]).plant(job["fault"], rank)
        sys.argv = [job["main"], *job["args"]]  # some tools read it
        if is_script:
            atexit._clear()  # registered by the imports
            try:
                runpy.run_path(job["main"], run_name="__main__")
            finally:
                atexit._run_exitfuncs()
            code = 0
        else:
            command = importlib.import_module(job["main"]).main
            code = command(job["args"]) if inspect.signature(command).parameters else command()
    except SystemExit as end:
        if isinstance(end.code, str):  # as the interpreter would
            print(end.code, file=sys.stderr)
        else:
            code = int(end.code or 0)
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
