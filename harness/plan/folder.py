"""Whether a run folder can be made where run.dir says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.config.run_config import RunConfig


def run_dir_problems(run: RunConfig) -> Iterator[str]:
    """A file in the place of the folder, or of one above it. Reads the disk of this machine."""
    text = run.run.dir
    if text is None:
        return
    path = Path(text).absolute()
    try:
        nearest = next((place for place in (path, *path.parents) if place.exists()), path)
    except OSError:  # a folder that may not be entered: opening the run says so
        return
    if nearest.exists() and not nearest.is_dir():
        what = "it" if nearest == path else str(nearest)
        yield f"run.dir is {text!r} ({run.origin('run.dir')}), but {what} is not a folder"
