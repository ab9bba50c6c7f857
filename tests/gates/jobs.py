"""The gates' jobs, done by ranks of a process group, one after another, with the real engine.

`run_jobs` starts the ranks as forks of one process that has imported everything; worker.py does
the jobs.
"""

import argparse
import math
import pickle
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from harness.launch.fork_server import Zygote
from harness.launch.ranks import PATIENCE_S, started
from harness.plan.machine import libaio_problems
from tests.gates.cell import Job

PER_LAUNCH = 40  # engines do not release everything: threads accumulate


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    env: Mapping[str, str | None] | None = None,
    zygote: Zygote | None = None,
) -> None:
    """Do the jobs whose results `out` lacks, in groups. Raises SystemExit with a rank's output if
    it fails, and before any job if this machine lacks something that one needs.

    `env`: environment changes for ranks on GPUs, which are new processes, since CUDA does not
    survive a fork. `zygote`: the process from which ranks are forked; a new one by default.
    """
    missing = [job for job in dict.fromkeys(jobs) if not (out / f"{job.result}.json").exists()]
    if not missing:
        return
    if any("nvme" in job.label for job in missing) and (problems := libaio_problems()):
        raise SystemExit("\n".join(problems))
    group_of = attrgetter("group")
    with nullcontext(zygote) if env is not None or zygote else Zygote() as zygote:
        for (_, ranks), members in groupby(sorted(missing, key=group_of), group_of):
            todo = list(members)
            for start in range(0, len(todo), PER_LAUNCH):
                _launch(zygote, todo[start : start + PER_LAUNCH], out, ranks, env)


def _launch(
    zygote: Zygote | None,
    jobs: Sequence[Job],
    out: Path,
    ranks: int,
    env: Mapping[str, str | None] | None,
) -> None:
    for stale in out.glob("*.error"):
        stale.unlink()
    path, module = out / f"todo-{ranks}.pickle", "tests.gates.jobs"
    path.write_bytes(pickle.dumps(jobs))
    arguments = [f"--jobs={path}", f"--out={out}"]
    if zygote is None:
        with started([sys.executable, "-m", module, *arguments], ranks, env=env or {}) as group:
            ended = group.wait()
    else:
        ended = zygote.run(
            arguments, ranks=ranks, limit_s=math.inf, main=module, patience_s=PATIENCE_S
        )
    if set(ended.codes) != {0}:
        texts = [path.read_text() for path in sorted(out.glob("*.error"))]
        raise SystemExit("\n".join(texts) or f"the process group ended with {ended.codes}")


def main(argv: list[str]) -> int:
    """Join the other ranks and do the jobs in a file, one after another.

    An exception is written to OUT/RANK.error and ends the whole group.
    """
    from harness.engine.processes import ending_together, join
    from harness.layout.world import World
    from tests.gates import worker

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=Path, required=True, help="pickled list of jobs")
    parser.add_argument("--out", type=Path, required=True, help="folder of their results")
    args = parser.parse_args(argv)
    jobs: list[Job] = pickle.loads(args.jobs.read_bytes())
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
