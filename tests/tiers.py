"""Which cases of a parametrised test run in `make test`, and which in a gate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_in_gate(name: str, cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """Return the cases with all but the first `keep` marked for the gate."""
    mark = pytest.mark.gate(name)
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(case if number < keep else pytest.param(*values, marks=mark))
    return marked
