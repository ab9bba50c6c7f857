"""This node's Python environment: can it import what a run needs? Standard library alone."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec

NEEDED = (  # by every run
    "tomllib",  # Python 3.11
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "pydantic",
    "numpy",
    "safetensors",
)


def host_name() -> str:
    """Return the scheduler's name of this node, by which it can be drained."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def environment_problem() -> str | None:
    """Return what this Python cannot import; None where it can import all.

    Torch is imported, since it brings libraries that may be missing; the others are looked for.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{sys.executable} cannot import {', '.join(missing)}"
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken installation raises anything
        return f"{sys.executable} cannot import torch: {type(error).__name__}: {error}"
    return None
