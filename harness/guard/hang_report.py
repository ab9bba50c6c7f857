"""The report of a hang: the ranks that hold the others up, and the place of every rank."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARY = str(Path(__file__).resolve().parents[1]) + os.sep

Report = dict[str, Any]


def judge(
    before: list[Report],
    after: list[Report],
    why: str,
    rank: int,
    place: Callable[[int], str] = lambda rank: "",
) -> Report:
    """Return a report on the ranks that hold the others up, from two readings of all heartbeats.

    `silent`: ranks that no longer write: stopped, gone with their node, or blocked outside Python.
    `behind`: if all write, the ranks that have made less progress. If both are empty, all wait at
    the same place for the network, a device or a disk. `place`: text that follows the number of a
    rank that is named.
    """
    silent = [
        now["rank"]
        for then, now in zip(before, after, strict=True)
        if now["rank"] != rank and now.get("tick") == then.get("tick") and "at" not in now
    ]
    is_silent = {*silent}
    talking = [beat for beat in after if beat["rank"] not in is_silent]
    furthest = max(beat["count"] for beat in talking)
    behind = [beat["rank"] for beat in talking if beat["count"] < furthest]
    held_up_by = silent or behind
    lines = [f"hang: {why} (guard.hang_*)"]
    lines += [f"  {_named(after[n], place)}: stopped, gone, or held outside Python" for n in silent]
    lines += [
        f"  {_named(after[n], place)}, for {after[n]['seconds']:.0f} s is behind" for n in behind
    ]
    named, places = {*silent, *behind}, defaultdict[str, list[int]](list)
    for beat in after:
        if beat["rank"] not in named:
            places[_place(beat)].append(beat["rank"])
    if not held_up_by:
        lines.append("  no rank is behind: all wait for the network, a device or a disk")
    for text, ranks in places.items():
        lines.append(f"  {len(ranks)} ranks ({ranges(ranks)}) {text}")
    return {
        "message": "\n".join(lines),
        "held_up_by": held_up_by,
        "silent": silent,
        "behind": behind,
        "ranks": after,
    }


def place_of(frame: FrameType | None) -> str:
    """Return a thread's place: its innermost line in this library, and the call it waits in."""
    innermost, own = frame, frame
    while own is not None and not own.f_code.co_filename.startswith(_LIBRARY):
        own = own.f_back
    places = [_line(f) for f in dict.fromkeys((own, innermost)) if f is not None]
    return " in ".join(reversed(places))


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


def _place(beat: Report) -> str:
    if "phase" not in beat:
        return "never wrote"
    return f"in '{beat['phase']}' of step {beat['step']}, {beat.get('at', '')}".rstrip(", ")


def _named(beat: Report, place: Callable[[int], str]) -> str:
    process = f" on {beat['host']} (process {beat['pid']})" if "host" in beat else ""
    return f"rank {beat['rank']}{place(beat['rank'])}{process}, {_place(beat)}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: [0, 1, 2, 5] -> "0-2, 5"."""
    edges: list[list[int]] = []
    for number in numbers:
        if edges and number == edges[-1][-1] + 1:
            edges[-1][1:] = [number]
        else:
            edges.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in edges)
