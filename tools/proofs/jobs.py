"""One rank of a process group that does job after job with the real engine."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness.engine.processes import ending_together, join
from harness.layout.world import World

Job = TypeVar("Job")
Done = TypeVar("Done")


def job_arguments(description: str | None) -> tuple[list[Any], Path]:
    """(the jobs, as JSON values; the folder of what they give), from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--jobs", type=Path, required=True, help="JSON list of jobs")
    parser.add_argument("--out", type=Path, required=True, help="folder of what they give")
    args = parser.parse_args()
    return json.loads(args.jobs.read_text()), args.out


def do_jobs(
    jobs: dict[str, Job],
    out: Path,
    do: Callable[[Job, World, torch.device], Done],
    keep: Callable[[Job, Done], None],
) -> None:
    """Join the other ranks and `do` the jobs, by name, one after the other; rank 0 `keep`s.

    What goes wrong lies in `out`/RANK.error, and ends the whole group.
    """
    world = World.from_environ()
    device = join(world)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else every bucket is filled
    with ending_together():
        for number, (name, job) in enumerate(jobs.items(), 1):
            began = time.perf_counter()
            try:
                done = do(job, world, device)
            except Exception:
                # Another rank may wait in a collective: all end here.
                (out / f"{world.rank}.error").write_text(f"{name}:\n{traceback.format_exc()}")
                raise
            if world.rank == 0:
                keep(job, done)
                seconds = time.perf_counter() - began
                print(f"  {number}/{len(jobs)} {name} in {seconds:.1f} s", flush=True)
