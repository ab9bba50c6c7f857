"""The lock of a run folder: one writer, named in the file, and nobody's once it has ended."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from harness.errors import ConfigError


def take_lock(path: Path) -> tuple[IO[str], str | None]:
    """The locked file, held until it is closed, and the dead owner that it was taken over from.

    The kernel's lock ends with its process, however that ends.  Between hosts it need not hold, so
    the file also names its owner: one on another host is believed to live, unless it was this very
    Slurm job before it was requeued.  The file is emptied at release, never deleted: two processes
    must not lock two files of one name.
    """
    file = path.open("a+", encoding="utf-8", errors="replace")
    job = os.environ.get("SLURM_JOB_ID")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = False
    except OSError as error:
        taken = isinstance(error, BlockingIOError)  # others: a filesystem without such locks
    file.seek(0)
    owner = _owner(file.read())
    if owner and owner["host"] != socket.gethostname():
        taken = taken or owner["job"] is None or owner["job"] != job
    name = (
        "process {pid} on {host}, Slurm job {job}, since {since}".format(**owner) if owner else None
    )
    if taken:
        file.close()
        raise ConfigError(
            f"run.dir = {path.parent} is being written by {name or 'another process'}: wait for "
            f"it, choose another run.dir, or, if it is dead, delete {path}"
        )
    since = datetime.now(UTC).isoformat(timespec="milliseconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "job": job, "since": since}
    file.truncate(0)
    file.write(json.dumps(owner))
    file.flush()
    return file, name


def release(file: IO[str]) -> None:
    """Name nobody in the file, and let go of it."""
    try:
        file.truncate(0)
    finally:
        file.close()


def _owner(text: str) -> dict[str, Any] | None:
    """Whom a lock file names; None for nobody, or a file that is damaged."""
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        return None
    names = {"pid", "host", "job", "since"}
    return owner if isinstance(owner, dict) and names <= owner.keys() else None
