"""Results that a launched file of checks wrote (tests/engine/rank.py), by name of the check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.two_ranks import Ended

Result = Callable[[str], list[Any]]


def results_of(ended: Ended, folder: Path, ranks: int = 2) -> Result:
    """Return the reader of a check's result on each rank; it fails with what went wrong there."""

    def read(check: str) -> list[Any]:
        values = []
        for rank in range(ranks):
            path = folder / f"{check}.{rank}.json"
            assert path.exists(), f"{check} never ended; codes {ended.codes}\n{ended.output}"
            result = json.loads(path.read_text())
            assert "error" not in result, result["error"]
            values.append(result["value"])
        return values

    return read
