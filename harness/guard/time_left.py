"""How long a batch job may still run: asked for once, then counted on a monotonic clock."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping

_SLOW_DISK = 50e6  # bytes/s that each rank can surely write; guessed
_MARGIN_S = 15.0  # for leaving the process group, and for the batch script to requeue the job


class TimeLeft:
    """When this process has to have ended; `limit_s` None: never.

    `save_bytes`: what each rank writes in a save, for as long as none was timed.
    """

    def __init__(self, limit_s: float | None, save_bytes: float) -> None:
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self._first_save_s = save_bytes / _SLOW_DISK

    @property
    def seconds(self) -> float | None:
        """What is left; None for ever."""
        return None if self._end is None else self._end - time.monotonic()

    def is_last_step(self, step_s: float | None, save_s: float | None) -> bool:
        """Whether another step, then the one in which all ranks learn of it, then a save, would
        end too late; with the longest step and save so far.
        """
        left_s = self.seconds
        needed = 2 * (step_s or 0.0) + 1.5 * (save_s or self._first_save_s) + _MARGIN_S
        return left_s is not None and left_s < needed


def slurm_seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Until the time limit of the Slurm job that this process is in; None without job or limit."""
    if "SLURM_JOB_END_TIME" in environ:  # Slurm 23.02 and later
        return float(environ["SLURM_JOB_END_TIME"]) - time.time()
    if "SLURM_JOB_ID" not in environ:
        return None
    command = ["squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%L"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return as_seconds(said.stdout.strip())


def as_seconds(text: str) -> float | None:
    """Slurm's [days-][[hours:]minutes:]seconds; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
