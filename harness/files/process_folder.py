"""Folders that belong to one process of this machine, such as its part of an NVMe drive.

A process locks its folder, and the kernel releases the lock however it ends. The next process
removes the folders that nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


def make_folder(parent: Path, prefix: str) -> Path:
    """Return a new folder of this process, PREFIX-..., locked until it ends."""
    # Locked before it has its name: another process would remove it.
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
