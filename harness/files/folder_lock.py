"""Locks that end with their process: on a run folder, for its only writer, and on a process's own
folder.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from harness.errors import ConfigError


def take_lock(path: Path) -> tuple[IO[str], str | None]:
    """Return the lock file, locked until it is closed, and the name of its previous owner if that
    died.

    The kernel releases the lock however the process ends. Such locks may not work between hosts, so
    the file also names its owner. An owner on another host counts as alive, unless it is this same
    Slurm job before a requeue. Where the filesystem has no such locks, an owner on this host counts
    as alive while its process runs. The file is emptied at release, never deleted, so that two
    processes cannot lock two files of the same name.

    Raises ConfigError if another process holds the lock.
    """
    file = path.open("a+", encoding="utf-8", errors="replace")
    job = os.environ.get("SLURM_JOB_ID")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken, has_locks = False, True
    except OSError as error:
        taken = has_locks = isinstance(error, BlockingIOError)  # others: it has no such locks
    file.seek(0)
    owner = _owner(file.read())
    if owner and owner["host"] != socket.gethostname():
        taken = taken or owner["job"] is None or owner["job"] != job
    elif owner and not has_locks:
        started = _started(owner["pid"])
        taken = started is not None and owner.get("started", started) == started
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
    pid, host = os.getpid(), socket.gethostname()
    owner = {"pid": pid, "started": _started(pid), "host": host, "job": job, "since": since}
    file.truncate(0)
    file.write(json.dumps(owner))
    file.flush()
    return file, name


def release(file: IO[str]) -> None:
    """Remove the owner from the file and release the lock."""
    try:
        file.truncate(0)
    finally:
        file.close()


def _owner(text: str) -> dict[str, Any] | None:
    """Return the owner that a lock file names; None if it names none or is damaged."""
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        return None
    names = {"pid", "host", "job", "since"}
    return owner if isinstance(owner, dict) and names <= owner.keys() else None


def _started(pid: object) -> int | None:
    """Return the start time of a process on this host, in clock ticks since boot; None if it is not
    running. A later process with the same number has another start time.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def make_folder(parent: Path, prefix: str) -> Path:
    """Return a new folder of this process, PREFIX-..., locked until it ends; the next process
    removes folders that are not locked.
    """
    # Locked before it gets its name, because remove_left_over removes unlocked folders by name.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{prefix}-", dir=parent))
    fcntl.flock(os.open(unnamed, os.O_RDONLY), fcntl.LOCK_EX)
    return unnamed.rename(unnamed.with_name(unnamed.name[1:]))


def remove_left_over(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
