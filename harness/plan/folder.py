"""Check of the run folder's path before the folder is created."""

from __future__ import annotations

from pathlib import Path

from harness.plan.draft import Draft


def check_run_dir(draft: Draft) -> None:
    """Refuse a path where the folder, or one above it, is a file. Reads this machine's disk."""
    text = draft.config.run.dir
    if text is None:
        return
    path = Path(text).absolute()
    try:
        nearest = next((place for place in (path, *path.parents) if place.exists()), path)
    except OSError:  # a folder without permission: opening the run reports it
        return
    if nearest.exists() and not nearest.is_dir():
        blocking = "it" if nearest == path else str(nearest)
        draft.problems.add("run.dir", f"but {blocking} is not a folder")
