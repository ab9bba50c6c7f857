"""The versions and the machine behind a table."""

import os
from importlib.metadata import version

from harness.layout.world import processor

PACKAGES = ("torch", "deepspeed", "transformers")


def versions() -> str:
    """Return the versions of the main packages, as text."""
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def machine() -> str:
    """Return this machine's processor, such as "2 cores of Intel(R) Xeon(R) Processor"."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {processor()}"
