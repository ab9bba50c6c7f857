"""Trials as one Slurm array: its submission and its progress."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.errors import ConfigError
from harness.guard.watchdog import ranges
from harness.launch.ranks import REPOSITORY
from harness.layout.world import World
from tools.slurm_queue import queued
from tools.sweeps.cost import Record
from tools.sweeps.spec import Sweep

if TYPE_CHECKING:  # Optuna
    from tools.sweeps.study import Study

_POLL_S = 1.0
JOB = "slurm_job"
"""File in a sweep's folder with the number of its newest array."""
_OF_GPUS = {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "tres-per-task"}
_PER_NODE = re.compile(r"(?:gpus-per-node=|gres=gpu:)(?:[^:,]+:)?(\d+)")
Say = Callable[[str], None]


def slurm_world(sweep: Sweep) -> World:
    """Return the machines of a trial. Raises ConfigError for options that say too little."""
    options, where = sweep.settings.slurm, f"sweep.slurm ({sweep.path})"
    nodes, cpu_ranks = options.get("nodes", 1), os.environ.get("CPU_RANKS_PER_NODE", "1")
    if not isinstance(nodes, int) or not cpu_ranks.isdecimal():
        raise ConfigError(f"{where}: nodes and CPU_RANKS_PER_NODE must be numbers")
    gpus = 0
    for key in _OF_GPUS & options.keys():
        asked = f"{key}={options[key]}"
        if number := _PER_NODE.fullmatch(asked):
            gpus = int(number[1])
        elif "gpu" in asked:
            raise ConfigError(
                f"{where}: {key} is {options[key]!r}, which leaves the number of GPUs per node "
                "open: use gpus-per-node = 8, or whatever a node has"
            )
    per_node = gpus or int(cpu_ranks)
    return World(
        world_size=nodes * per_node,
        local_world_size=per_node,
        accelerator="cuda" if gpus else "cpu",
    )


def sbatch_options(sweep: Sweep) -> list[str]:
    """Return the options of a trial's job."""
    return [f"--{key}={value}" for key, value in sweep.settings.slurm.items()]


def submit(sweep: Sweep, study: Study, say: Say) -> str | None:
    """Submit the remaining trials unless they are queued; return the array's number.

    None if no trial is left. Raises ConfigError if Slurm rejects the job.
    """
    file = sweep.folder / JOB
    if file.exists() and queued([job := file.read_text().strip()]):
        say(f"job {job} is in the queue")
        return job
    left = [record.number for record in study.records() if not record.has_ended]
    if not left:
        return None
    array = ranges(left).replace(" ", "")
    words = [
        *("sbatch", "--parsable", f"--array={array}%{sweep.settings.parallel}"),
        *(f"--job-name={sweep.folder.name}", f"--output={sweep.folder}/slurm-%A_%a.out"),
        *sbatch_options(sweep),
        *(str(REPOSITORY / "slurm" / "sweep.sbatch"), str(REPOSITORY), str(sweep.path)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch rejected the sweep: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    file.write_text(f"{job}\n")
    say(f"submitted {len(left)} trials as job {job}")
    return job


def follow(job: str, study: Study, ended: Callable[[Record], None]) -> None:
    """Wait until no task of an array is left; `ended` is called with every trial that has ended."""
    seen = {record.number for record in study.records() if record.has_ended}
    while True:
        is_queued = bool(queued([job]))
        for record in study.records():
            if record.has_ended and record.number not in seen:
                seen.add(record.number)
                ended(record)
        if not is_queued:
            return
        time.sleep(_POLL_S)
