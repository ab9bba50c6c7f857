"""The lines of a step whose operators are the first to touch pages, which the kernel then maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.proofs.overhead.spread import COMPARED, NAMES
from tools.proofs.overhead.turns import COUNTED


def mapped_rows(of_side: dict[str, list[dict[str, Any]]], most: int = 12) -> Iterator[str]:
    """Yield the lines of a table with a row for each line and operator, those that map most pages
    first, from the measurements of each side's rank 0.
    """
    faults = {side: of_side[side][0]["faults"] for side in COMPARED}
    places = sorted(
        {place for side in COMPARED for place in faults[side]},
        key=lambda place: -sum(faults[side].get(place, 0) for side in COMPARED),
    )
    yield f"| pages mapped in a step | {' | '.join(NAMES[side] for side in COMPARED)} |"
    yield "|---|---:|---:|"
    shown = [  # at least a page a step
        place
        for place in places[:most]
        if any(faults[side].get(place, 0) >= COUNTED for side in COMPARED)
    ]
    for place in shown:
        yield _row(f"`{place}`", [faults[side].get(place, 0) for side in COMPARED])
    others = [place for place in places if place not in shown]
    rest = [sum(faults[side].get(place, 0) for place in others) for side in COMPARED]
    yield _row(f"{len(others)} others", rest)
    yield _row("all operators", [sum(faults[side].values()) for side in COMPARED])


def _row(title: str, pages: list[int]) -> str:
    return f"| {title} | {' | '.join(f'{count / COUNTED:,.0f}' for count in pages)} |"
