"""Measurements that are kept as files, so that a long comparison goes on where it was ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kept(path: Path) -> Any:
    """Return what `keep` has written to `path`, or None."""
    return json.loads(path.read_text()) if path.exists() else None


def keep(path: Path, measured: Any) -> None:
    """Write `measured` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(measured))
    partial.replace(path)
