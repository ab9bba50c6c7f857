"""The versions and the machine behind a table."""

import os
import platform
import re
from importlib.metadata import version

from harness.layout.world import CPU_INFO

PACKAGES = ("torch", "deepspeed", "transformers")


def versions() -> str:
    """Return the versions of the main packages, as text."""
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def machine() -> str:
    """Return this machine's processor, such as "2 cores of Intel(R) Xeon(R) Processor"."""
    cores = len(os.sched_getaffinity(0))
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        model = None
    return f"{cores} cores of {model[1] if model else platform.machine()}"
