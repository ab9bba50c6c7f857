"""Plants faults into the real code of one rank: at a named place, the n-th time it is reached.

{"rank": 1, "at": "after a file", "nth": 2, "do": "kill"}; `do`: kill (SIGKILL), term, usr1 (each
signal twice), hup, int, stop (SIGSTOP), sleep (for "seconds"), skip (the call that would begin
there), raise, starve (no thread can start), fill or readonly (the file system at "mount"), full
("file" accepts no more data), truncate (half of "file"), differ (the exported model has another
loss), hours (the run has used 50 GPU hours). "nccl": the process group is left as NCCL leaves it.
{"defect": NAME}: one of the parity gate.
"""

import contextlib
import functools
import itertools
import os
import pkgutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import loop
from harness.layout.world import World
from harness.run.run import Run
from harness.runfolder import RunFolder
from harness.steps import Step
from tests.real_runs import fill
from tests.tables import beside
from tools.acceptance.plant import take_scaled_step

_PLANTED = contextlib.ExitStack()


def plant(fault: dict[str, Any], rank: int) -> None:
    """Wrap the place that `fault` names on its rank; apply what it spoils on all ranks."""
    if fault.get("do") == "hup":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes ranks ignore it
    if "defect" in fault:
        from tests.gates.defects import planted

        _PLANTED.enter_context(planted(fault["defect"], World()))
        return
    if "spoil" in fault:
        spoil(fault["spoil"])
        return
    if fault.get("nccl"):
        _leave_as_nccl()
    if rank == fault.get("rank", 0):
        act = _Nth(fault.get("nth", 1), functools.partial(_do, fault))
        PLACES[fault["at"]](act)


class _Skip(Exception):
    """Raised to skip the call that was about to begin."""


class _Nth:
    """Calls a function once, the n-th time."""

    def __init__(self, nth: int, act: Callable[[], None]) -> None:
        self.left = nth
        self.act = act

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


class _Halves:
    """A file that triggers an action when half of its first tensor is written."""

    def __init__(self, file: Any, act: Callable[[], None]) -> None:
        self.file, self.act, self.writes = file, act, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: Any) -> None:
        self.writes += 1
        middle = len(data) // 2
        self.file.write(data[:middle])
        if self.writes == 2:  # the first write is the header
            self.file.flush()
            self.act()
        self.file.write(data[middle:])


def _do(fault: dict[str, Any]) -> None:
    match fault["do"]:
        case "full":
            path = Path(fault["file"])
            path.rename(path.with_name(f"{path.name}.whole"))
            path.symlink_to("/dev/full")  # as if the disk had filled up with the last line
        case "differ":
            from harness.run import exporting

            exporting._loss = lambda *_: 1000.0
        case "hours":
            RunFolder.gpu_hours = property(lambda _: 50.0)  # type: ignore[method-assign, assignment]
        case "starve":
            threading.Thread._bootstrap = _cannot_begin  # type: ignore[attr-defined]
        case "raise":
            raise RuntimeError("a planted failure of one rank")
        case "hup" | "int" | "term" | "usr1" | "stop" | "kill" as name:
            for _ in range(1 + (name in ("term", "usr1"))):
                os.kill(os.getpid(), getattr(signal, f"SIG{name.upper()}"))
        case "skip":
            raise _Skip
        case "sleep":
            time.sleep(fault["seconds"])
        case "fill":
            fill(Path(fault["mount"]))
        case "truncate":
            os.truncate(fault["file"], os.path.getsize(fault["file"]) // 2)  # noqa: PTH202
        case "readonly":
            subprocess.run(["mount", "-o", "remount,ro", fault["mount"]], check=True)


def _cannot_begin(_: threading.Thread) -> None:
    """Raise as in a process without free address space."""
    raise MemoryError


def _leave_as_nccl() -> None:
    """Emulate NCCL: gloo closes its connections, but NCCL's group waits for all its kernels."""
    leave = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        if group is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            store.add("leaving", 1)
            with contextlib.suppress(dist.DistNetworkError):  # rank 0, which owns it, has moved on
                while store.add("leaving", 0) < dist.get_world_size():
                    time.sleep(0.1)
        leave(group)

    dist.destroy_process_group = destroy_process_group


def _around(owner: Any, name: str, before: Any = None, after: Any = None) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            if before is not None:
                before(*args)
        except _Skip:
            return None
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, wrapped)


def _places() -> dict[str, Callable[[Callable[[], None]], None]]:
    from harness.checkpoint import save, store
    from harness.engine.zero import ZeroEngine

    def inside_a_file(act: Callable[[], None]) -> None:
        original = Path.open

        def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = original(path, mode, *args, **kwargs)
            return _Halves(file, act) if mode == "xb" and path.name.startswith("rank-") else file

        Path.open = opened  # type: ignore[method-assign]

    def fsync(count: int) -> Callable[[Callable[[], None]], None]:
        """Place a fault in `publish`: 1 before the rename, 2 after it, 3 before the pointer."""

        def place(act: Callable[[], None]) -> None:
            calls = {"in": 0}
            _around(store.Store, "publish", before=lambda *_: calls.update({"in": 0}))

            def counted(*_: Any) -> None:
                calls["in"] += 1
                if calls["in"] == count:
                    act()

            _around(store, "fsync", before=counted)

        return place

    def manifest(act: Callable[[], None]) -> None:
        def named(path: Any, *_: Any) -> None:
            if path.name == "manifest.json":
                act()

        _around(save, "write_bytes", before=named)

    def removing(act: Callable[[], None]) -> None:
        def checkpoint(path: Any, *_: Any) -> None:
            if "checkpoints" in Path(path).parts:
                act()

        _around(store.shutil, "rmtree", before=checkpoint)

    def any_moment(act: Callable[[], None]) -> None:
        """Act at some millisecond after the first micro-batch, wherever the process is then."""

        def tick() -> None:
            while True:
                time.sleep(0.001)
                act()

        clock = threading.Thread(target=tick, daemon=True)

        def started(*_: Any) -> None:
            if clock.ident is None:
                clock.start()

        _around(ZeroEngine, "apply", before=started)

    def call(name: str) -> Callable[[Callable[[], None]], None]:
        path, attribute, when = f"{name} before".split()[:3]
        owner = pkgutil.resolve_name(path)
        assert hasattr(owner, attribute), f"{owner} has no {attribute}"  # checked for every fault
        return lambda act: _around(owner, attribute, **{when: lambda *_: act()})

    return {
        **{place: call(name) for place, name in beside(__file__, "places.toml")["calls"].items()},
        "inside a file": inside_a_file,
        "before the manifest": manifest,
        "before the rename": fsync(1),
        "after the rename": fsync(2),
        "before the pointer": fsync(3),
        "during retention": removing,
        "any moment": any_moment,
    }


PLACES = _places()


def spoil(spoils: dict[str, Any]) -> None:
    """Spoil a run. `loss`: {first sample of a step: factor of its loss}, only on the last rank.
    `flip`: step after which one bit of the last rank's `weight` (by name, or the last one) is
    flipped. `ruin`: step after which its last weight is NaN. `nan`: number of steps until a loss is
    NaN, only on the last rank.
    """
    steps = itertools.count(1)
    take_step = loop.take_step

    def spoiled(run: Run, step: Step) -> Any:
        last = run.plan.world.rank == run.plan.world.world_size - 1
        factor = spoils.get("loss", {}).get(str(step.reads.first_sample), 1.0) if last else 1.0
        if next(steps) == spoils.get("nan") and last:
            factor = float("nan")
        result = take_scaled_step(run, step, take_step, float(factor))
        if last and step.number == spoils.get("flip"):
            weights = {replica.name: replica.tensor for replica in run.engine.replicated()}
            weights |= {name: weight for name, weight, _ in run.engine.tied()}
            weight = weights[spoils.get("weight", [*weights][-1])]
            weight.view(-1).view(torch.int32)[-1] ^= 1
        if step.number == spoils.get("ruin"):
            *_, weight = run.engine.module.parameters()
            weight.data.fill_(float("nan"))
        return result

    loop.take_step = spoiled
