"""The time in which this host launches a layer, kept from the first measurement for later plans."""

import contextlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path


def cache_folder() -> Path | None:
    """Return this project's folder of the user's cache; None if it cannot be made."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(root).expanduser() / "decoder-harness"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder


def kept_launch_ms() -> float | None:
    """Return the milliseconds in which this host launches a Llama layer's forward pass, with the
    installed torch; None if nobody measured them.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        milliseconds = float(json.loads(_file().read_text(encoding="utf-8"))["layer_launch_ms"])
        return milliseconds if 0 < milliseconds < 1e3 else None
    return None


def keep_launch_ms(milliseconds: float) -> None:
    """Keep a measurement for later plans on this host, if there is a cache."""
    with contextlib.suppress(OSError):
        _file().write_text(json.dumps({"layer_launch_ms": round(milliseconds, 4)}) + "\n")


def _file() -> Path:
    """Return the file of this host. Raises OSError without a cache."""
    if (folder := cache_folder()) is None:
        raise FileNotFoundError("no cache")
    return folder / f"host-{platform.node()}-torch-{version('torch')}.json"
