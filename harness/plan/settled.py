"""Defaults that depend on data, folder, model or day are decided once: plan.json keeps them under
"settled", and a run that goes on, or branches off, reads them back.

Precedence: default < settled < file < command line. Settings of the user are not settled; they are
compared instead (checkpoint/compatibility.py).
"""

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config.assignments import KEPT, TODAY
from harness.config.run_config import run_and_step
from harness.config.sections import LENGTHS
from harness.errors import ConfigError
from harness.files.records import Unreadable, read_object
from harness.plan.fine_tuning import WARMUP
from harness.plan.plan import FLOATING, Draft

_EXCLUSIVE = (LENGTHS, WARMUP)
"""Keys of which a run has one: another one that the user sets replaces the settled one."""


def read_settled(draft: Draft) -> None:
    """Lay what the run being continued has settled under what the user sets. Reads this machine's
    disk.
    """
    config = draft.config
    asked = {key for keys in _EXCLUSIVE if any(map(config.is_set, keys)) for key in keys}
    is_open = config.model.attention == "auto"
    values = {
        key: value
        for key, value in _settled_in(draft).items()
        if key not in (*asked, *FLOATING) and not key.startswith(("run.", "own."))
        if not config.is_set(key) or (key == "model.attention" and is_open)
    }
    if values:
        with contextlib.suppress(ConfigError, ValueError):  # the record is damaged
            draft.decide(values, KEPT)


def date_chats(draft: Draft) -> None:
    """Use today's date in chats, in UTC, which is the same on every node."""
    if draft.config.data.date is None:
        draft.decide({"data.date": datetime.now(UTC).date().isoformat()}, TODAY)


def _settled_in(draft: Draft) -> dict[str, Any]:
    """Return what the run that is continued has settled; empty for a new run, or if its record is
    missing or unreadable.
    """
    config = draft.config
    folders = [Path(config.run.dir)] if config.run.dir is not None else []
    folders += [run_and_step(config.resume.from_)[0]] if config.resume.from_ is not None else []
    for folder in folders:
        with contextlib.suppress(Unreadable, OSError):
            settled = (read_object(folder / "plan.json") or {}).get("settled")
            if isinstance(settled, dict):
                return settled
    return {}
