"""The time in which hosts of this kind launch a layer, kept from a first measurement for later
plans.
"""

import contextlib
import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.layout.world import processor


def cache_folder() -> Path:
    """Return this project's folder of the user's cache, which may not exist. Raises RuntimeError
    without a home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "decoder-harness"


def kept_launch_ms(gpu: str) -> float | None:
    """Return the milliseconds in which a host like this one launches a Llama layer's forward pass
    on such a GPU, a key of gpus.toml, with the installed torch; None if nobody measured them.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        kept = json.loads(launch_file(gpu).read_text(encoding="utf-8"))
        milliseconds = float(kept["layer_launch_ms"])
        return milliseconds if 0 < milliseconds < 1e3 else None
    return None


def keep_launch_ms(gpu: str, milliseconds: float) -> None:
    """Keep a measurement for later plans, if there is a cache."""
    with contextlib.suppress(OSError, RuntimeError):
        path = launch_file(gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"layer_launch_ms": round(milliseconds, 4), **_kind(gpu)}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def launch_file(gpu: str) -> Path:
    """Return the file for hosts of this kind: the same processor, cores, GPU and torch."""
    digest = hashlib.sha256(json.dumps(_kind(gpu)).encode()).hexdigest()
    return cache_folder() / f"host-{digest[:12]}.json"


def _kind(gpu: str) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }
