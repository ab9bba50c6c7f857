"""The gates' worker: one rank of a process group that does one job after another with the real
engine.

`run_jobs` starts the ranks as forks of one process that has imported everything. Each gate's
worker.py has `do(job, world, device, out)`, which does one job and writes its result to `out`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from harness.launch.fork_server import Zygote
from harness.launch.ranks import PATIENCE_S, raise_errors, run_module
from harness.plan.machine import libaio_problems

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    J = TypeVar("J", bound=DataclassInstance)

PER_LAUNCH = 40  # engines do not release everything: threads accumulate


class Group(NamedTuple):
    """Jobs that one process group can do; groups run in this order."""

    place: int
    ranks: int


def run_jobs(
    gate: str,
    jobs: Sequence[J],
    out: Path,
    group_of: Callable[[J], Group],
    env: Mapping[str, str | None] | None = None,
    zygote: Zygote | None = None,
) -> None:
    """Do `jobs`, in groups. Raises SystemExit with a rank's output if it fails, and before any job
    if this machine lacks something that one needs.

    `env`: environment changes for ranks on GPUs, which are new processes, since CUDA does not
    survive a fork. `zygote`: the process from which ranks are forked; a new one by default.
    """
    if not jobs:
        return
    if any("nvme" in str(job) for job in jobs) and (problems := libaio_problems()):
        raise SystemExit("\n".join(problems))
    with nullcontext(zygote) if env is not None or zygote else Zygote() as zygote:
        for group, members in groupby(sorted(jobs, key=group_of), group_of):
            todo = list(members)
            for start in range(0, len(todo), PER_LAUNCH):
                part = todo[start : start + PER_LAUNCH]
                _launch(zygote, gate, part, out, group.ranks, env)


def _launch(
    zygote: Zygote | None,
    gate: str,
    jobs: Sequence[J],
    out: Path,
    ranks: int,
    env: Mapping[str, str | None] | None,
) -> None:
    for stale in out.glob("*.error"):
        stale.unlink()
    path = out / f"todo-{ranks}.json"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    arguments = [gate, f"--jobs={path}", f"--out={out}"]
    if zygote is None:
        run_module("tests.gates.jobs", arguments, ranks, out, env or {})
        return
    ended = zygote.run(
        arguments,
        ranks=ranks,
        main="tests.gates.jobs",
        limit_s=math.inf,
        patience_s=PATIENCE_S,
    )
    raise_errors(ended.codes, out)


def main(argv: list[str]) -> int:
    """Join the other ranks and do the jobs in a file, one after another.

    An exception is written to OUT/RANK.error and ends the whole group.
    """
    from harness.engine.processes import ending_together, join
    from harness.layout.world import World

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gate", help="parity, checkpoints or memory")
    parser.add_argument("--jobs", type=Path, required=True, help="JSON list of jobs")
    parser.add_argument("--out", type=Path, required=True, help="folder of what they give")
    args = parser.parse_args(argv)
    worker: Any = importlib.import_module(f"tests.gates.{args.gate}.worker")
    jobs = [worker.Job.from_json(values) for values in json.loads(args.jobs.read_text())]
    world = World.from_environ()
    device = join(world)
    with ending_together():
        for number, job in enumerate(jobs, 1):
            began = time.perf_counter()
            try:
                worker.do(job, world, device, args.out)
            except Exception:
                # Another rank may wait in a collective: end all of them.
                error = args.out / f"{world.rank}.error"
                error.write_text(f"{job.label}:\n{traceback.format_exc()}")
                raise
            if world.rank == 0:
                seconds = time.perf_counter() - began
                print(f"  {number}/{len(jobs)} {job.label} in {seconds:.1f} s", file=sys.stderr)
    return 0


def compute_alike() -> None:
    """Make torch choose deterministic kernels, as gates that compare bits need."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise every bucket is filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
