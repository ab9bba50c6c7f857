"""The folder of a sweep: a copy of its file, which a sweep that goes on must agree with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.assignments import flat
from harness.config.run_file import read_toml
from harness.errors import ConfigError, worded
from tools.sweeps.spec import Sweep

_MAY_CHANGE = ("sweep.trials", "sweep.parallel", "sweep.budget.", "sweep.name")


def keep_file(sweep: Sweep) -> None:
    """Make the folder, and copy the sweep's file into it.

    Raises ConfigError if another sweep is there, with every key that differs.
    """
    copy = sweep.folder / "sweep.toml"
    if copy.exists():
        before, now = _compared(read_toml(copy)), _compared(sweep.tree)
        problems = [
            worded(key, now.get(key), str(sweep.path), f"but {before.get(key)!r} in {copy}")
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        if problems:
            raise ConfigError([*problems, f"{copy} is of another sweep: set sweep.name"])
    sweep.folder.mkdir(parents=True, exist_ok=True)
    if sweep.path.resolve() != copy.resolve():
        copy.write_bytes(Path(sweep.path).read_bytes())


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(tree) if not key.startswith(_MAY_CHANGE)}
