"""The remaining time of the job. Standard library only: batch scripts ask for it."""

import os
import re
import subprocess
import time
from collections.abc import Mapping

_SLOW_DISK = 50e6  # bytes/s per rank that any disk should reach; an assumption
_MARGIN_S = 15.0  # to leave the process group, and for the batch script to requeue the job


class TimeLeft:
    """The time until this process must have ended; unlimited if `limit_s` is None.

    `save_bytes`: bytes that each rank writes in a save, used until a save has been timed.
    """

    def __init__(self, limit_s: float | None, save_bytes: float) -> None:
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self.first_save_s = save_bytes / _SLOW_DISK

    @property
    def seconds(self) -> float | None:
        """Remaining seconds; None if unlimited."""
        return None if self._end is None else self._end - time.monotonic()

    def is_short_of(self, seconds: float) -> bool:
        """Return True if there is no time for `seconds` of work and the end of the process."""
        left_s = self.seconds
        return left_s is not None and left_s < seconds + _MARGIN_S


def slurm_seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds left of this process's Slurm job; None without a job or limit."""
    if "SLURM_JOB_END_TIME" in environ:  # Slurm 23.02 and later
        return float(environ["SLURM_JOB_END_TIME"]) - time.time()
    if "SLURM_JOB_ID" not in environ:
        return None
    job = environ["SLURM_JOB_ID"]  # in an array's last task, this names all of its tasks
    if "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return as_seconds(process.stdout.strip())


def as_seconds(text: str) -> float | None:
    """Return Slurm's [days-][[hours:]minutes:]seconds in seconds; None for other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
