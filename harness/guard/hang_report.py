"""Who holds the other ranks up, and where everyone is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARY = str(Path(__file__).resolve().parents[1]) + os.sep

Report = dict[str, Any]


def judge(before: list[Report], after: list[Report], why: str, rank: int) -> Report:
    """Who holds the others up, from two looks at all ranks' heartbeats.

    `silent`: ranks that no longer write: stopped, gone with their node, or held outside Python.
    `behind`: where all write, those that have come less far than the rest. Neither: all wait at
    one place, for something that is no rank.
    """
    silent = [
        now["rank"]
        for then, now in zip(before, after, strict=True)
        if now["rank"] != rank and now.get("tick") == then.get("tick") and "at" not in now
    ]
    talking = [found for found in after if found["rank"] not in silent]
    furthest = max(found["count"] for found in talking)
    behind = [found["rank"] for found in talking if found["count"] < furthest]
    held_up_by = silent or behind
    lines = [f"hang: {why} (guard.hang_*)"]
    lines += [f"  {_named(after[n])}: stopped, gone, or held outside Python" for n in silent]
    lines += [f"  {_named(after[n])}, for {after[n]['seconds']:.0f} s is behind" for n in behind]
    rest = [found for found in after if found["rank"] not in (*silent, *behind)]
    if not held_up_by:
        lines.append("  no rank is behind: all wait for the network, a device or a disk")
    for text in dict.fromkeys(_place(found) for found in rest):
        ranks = [found["rank"] for found in rest if _place(found) == text]
        lines.append(f"  {len(ranks)} ranks ({ranges(ranks)}) {text}")
    return {
        "message": "\n".join(lines),
        "held_up_by": held_up_by,
        "silent": silent,
        "behind": behind,
        "ranks": after,
    }


def place_of(frame: FrameType | None) -> str:
    """Where a thread is: its innermost line in this library, and what that waits in."""
    innermost, found = frame, frame
    while found is not None and not found.f_code.co_filename.startswith(_LIBRARY):
        found = found.f_back
    places = [_line(f) for f in dict.fromkeys((found, innermost)) if f is not None]
    return " in ".join(reversed(places))


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


def _place(found: Report) -> str:
    if "phase" not in found:
        return "never wrote"
    return f"in '{found['phase']}' of step {found['step']}, {found.get('at', '')}".rstrip(", ")


def _named(found: Report) -> str:
    where = f" on {found['host']} (process {found['pid']})" if "host" in found else ""
    return f"rank {found['rank']}{where}, {_place(found)}"


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in found)
