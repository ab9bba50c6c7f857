"""Starts real multi-rank runs within two seconds by forking a process that has imported everything.

`python -m harness.launch.fork_server FD` reads one job per line, forks its ranks, and replies on
file descriptor FD with the rendezvous port and the pids, which are then polled one by one.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from harness.launch.ranks import (
    ON_CPU,
    REPOSITORY,
    Forked,
    Outcome,
    Ranks,
    code_of,
    deferred,
    ending,
    environment,
    fork,
    free_port,
    place_of,
    python_path,
)

_GRACE_S = 2.0  # for processes that ranks started to end after them


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
            start_new_session=True,
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
        with ending(lambda: self.start(main, args, ranks, cwd, logs, fault=fault)) as group:
            self.ports.append(group.port)
            ended = group.wait(limit_s, patience_s=patience_s)
            # A killed rank cannot end its compiler.
            for left in group.others(_GRACE_S) if None not in ended.codes else ():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    self.left.append(f"{left.pid}: {' '.join(left.cmdline())} ({logs})")
        return ended

    def start(
        self,
        main: str,
        args: list[str],
        ranks: int,
        cwd: Path | None,
        logs: Path | None,
        env: dict[str, str] | None = None,
        fault: dict[str, Any] | None = None,
    ) -> Ranks:
        """Fork `ranks` ranks that call main() of module `main`, without waiting for them.

        `env` is their complete environment except for the rank variables. Variables that modules
        read on import have no effect: the imports are done. If `main` is the path of a script, it
        runs as under the interpreter: with the file `in` of `logs`, if any, as its stdin, and with
        `out` and `err` as its output.
        """
        job = {"main": main, "args": args, "ranks": ranks, "env": env, "fault": fault}
        job |= {"planter": self._planter, "cwd": str(cwd) if cwd else None}
        names = ("out",) if main.endswith(".py") else [f"rank-{rank}.log" for rank in range(ranks)]
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        port, pids = self._ask({**job, "logs": str(logs) if logs else None})
        processes = [Forked(pid, lambda pid: self._ask({"poll": pid})) for pid in pids]
        return Ranks(processes, [logs / name for name in names] if logs else [], port)

    def _ask(self, job: dict[str, Any]) -> Any:
        assert self._process.stdin
        with deferred(signal.SIGINT, signal.SIGTERM):  # the next job must not get this answer
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

    share_gloo_threads()
    # DeepSpeed calls this twice for every engine with a CPU optimizer, which takes 3 s.
    cpu_info = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: cpu_info
    gc.collect()
    gc.freeze()  # exclude the imports from searches for tensors
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(_answer(json.loads(line), answers.fileno())), file=answers, flush=True)


def share_gloo_threads() -> None:
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
        return code_of(job["poll"])
    port = free_port()
    return port, [fork(partial(_rank, rank, port, job, to_answer)) for rank in range(job["ranks"])]


def _rank(rank: int, port: int, job: dict[str, Any], to_answer: int) -> int | None:
    os.close(to_answer)
    is_script, read = job["main"].endswith(".py"), f"{job['logs']}/in"
    if job["logs"]:
        names = ("out", "err") if is_script else (f"rank-{rank}.log",) * 2
        for descriptor, name in enumerate(names, 1):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            os.dup2(os.open(f"{job['logs']}/{name}", flags), descriptor)
    os.dup2(os.open(read if os.path.exists(read) else os.devnull, os.O_RDONLY), 0)  # noqa: PTH110
    if job["env"]:
        os.environ.clear()
        os.environ.update(job["env"])
        tempfile.tempdir = None  # read it from the new environment
    if not is_script:
        os.environ.update(place_of(rank, job["ranks"], port))
    if job["cwd"]:
        os.chdir(job["cwd"])
    if job["fault"]:
        importlib.import_module(job["planter"]).plant(job["fault"], rank)
    sys.argv = [job["main"], *job["args"]]  # some tools read it
    if not is_script:
        command: Callable[..., int | None] = importlib.import_module(job["main"]).main
        return command(job["args"]) if inspect.signature(command).parameters else command()
    atexit._clear()  # registered by the imports
    try:
        runpy.run_path(job["main"], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    main()
