"""Compilers that this machine lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path


def missing_for_cpu_adam() -> str | None:
    """Return the missing tools for DeepSpeed's CPU Adam, which is compiled; None if none is.

    DeepSpeed's own `is_compatible` does not look for a compiler; the build then fails
    inside `initialize`, after the model was built.
    """
    present = {"c++": _has_compiler(), "ninja": _has_ninja()}
    missing = [name for name, is_there in present.items() if not is_there]
    return f"{', '.join(missing)} not found" if missing else None


def missing_for_compile(accelerator: str) -> str | None:
    """Return the missing tool for torch.compile; None if nothing is missing."""
    if accelerator == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton (pip install)"
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++"))
    return None if any(map(shutil.which, names)) else "a C++ compiler (apt install g++)"


def _has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def ninja_folder() -> str | None:
    """Return the folder of the program that the package ninja has brought; None without it.

    Its files tell, wherever it is installed: ninja.BIN_DIR knows the interpreter's environment
    alone, and is "" where the package is found in another one.
    """
    try:
        files = importlib.metadata.files("ninja") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = [Path(os.path.normpath(file.locate())) for file in files if file.name == "ninja"]
    return next((str(path.parent) for path in programs if os.access(path, os.X_OK)), None)


def _has_ninja() -> bool:
    return (ninja_folder() or shutil.which("ninja")) is not None
