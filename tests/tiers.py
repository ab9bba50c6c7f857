"""Splits the cases of a parametrized test between `make test` and a gate."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rest_in_gate(gate: str, cases: Iterable[Any], keep: int | Collection[Any] = 1) -> list[Any]:
    """Return the cases, all but some marked for a gate.

    `keep`: the cases in `make test`, or the number of first ones.
    """
    cases = list(cases)
    kept = cases[:keep] if isinstance(keep, int) else keep
    return [
        case
        if case in kept
        else pytest.param(
            *(case if isinstance(case, tuple | list) else (case,)), marks=pytest.mark.gate(gate)
        )
        for case in cases
    ]
