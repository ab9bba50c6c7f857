"""DeepSpeed's compiled operators: whether they can be built here, and what runs without them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from harness.errors import ConfigError


def problem_of(builder: str) -> str | None:
    """Load the operator of DeepSpeed's `builder`; None, or why this rank cannot."""
    try:
        get_accelerator().create_op_builder(builder).load(verbose=False)
    except (ConfigError, RuntimeError) as error:  # DeepSpeed's own for what it lacks
        return str(error)
    return None


def compiled_adam_available(accelerator: str) -> str | None:
    """None when DeepSpeed's compiled Adam can be built here, else what is missing.

    DeepSpeed's own `is_compatible` says yes without looking for a compiler; the build then fails
    inside `initialize`, after the model was built.
    """
    needed = ["c++", "ninja"] if accelerator == "cpu" else ["c++", "ninja", "nvcc"]
    found = {"c++": _compiler(), "ninja": _ninja(), "nvcc": _nvcc()}
    missing = [name for name in needed if not found[name]]
    return f"{', '.join(missing)} not found" if missing else None


def with_torch_adam(config: dict[str, Any]) -> dict[str, Any]:
    """The same JSON with torch's Adam in the place of DeepSpeed's compiled one."""
    optimizer = config["optimizer"]
    params = {**optimizer["params"], "torch_adam": True}
    return {**config, "optimizer": {**optimizer, "params": params}}


def _compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def _ninja() -> bool:
    try:
        import ninja  # noqa: F401
    except ImportError:
        return shutil.which("ninja") is not None
    return True


def _nvcc() -> bool:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").exists()
