"""The simulator's results as text: waits of the host by JSON and line of code, races if any."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from tests.gates.streams.cells import all_cells
from tests.gates.streams.trial import DECIDES, Row, hot
from tools.made_with import versions

REPOSITORY = str(Path(__file__).resolve().parents[3])
_OWNERS = ("deepspeed/", "transformers/", "harness/", "tests/", "tools/")
_PASSED_THROUGH = (
    *("tests/gates/streams/", "deepspeed/comm/", "deepspeed/utils/nvtx"),
    "deepspeed/utils/timer",
)


def place() -> str:
    """Return file:line of the innermost line of those owners that leads here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := _owned(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def is_within(part: str, frames: int = 16) -> bool:
    """Return True if one of the innermost frames is of a file whose path has `part` in it."""
    frame = sys._getframe(1)
    for _ in range(frames):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if part in frame.f_code.co_filename:
            return True
    return False


@functools.cache
def _owned(file: str) -> str:
    """Return a file's path in its package; "" where it belongs to nobody of interest."""
    _, installed, inside = file.rpartition("/site-packages/")
    if not installed:
        inside = file.removeprefix(f"{REPOSITORY}/")
    owned = inside.startswith(_OWNERS) and not inside.startswith(_PASSED_THROUGH)
    return inside if owned else ""


_ABOUT = """\
A host that waits for its GPU launches nothing meanwhile. These are all waits of one optimizer step,
by simulation: real runs on CPU ranks whose device has streams and events with vector clocks, and
which sees every operation's reads and writes (`python -m tests.gates.check_streams --full`). The
same runs show that no two streams, and no stream and the host, use the same memory without an
order, and that no block is reused while another stream may still use it. Not seen: the inside of
NCCL, and of kernels that are not torch's (DeepSpeed's Adam on the CPU, Triton).""".splitlines()
_WHEN = {"data": "step", "micro-batches": "micro-batch", "step": "step", "verdict": "step"}


def terminal_line(row: Row) -> str:
    """Return a line on one cell."""
    if row.skipped:
        return f"{row.cell.name}: not run: {row.skipped}"
    if row.failure:
        return row.failure
    counts = ", ".join(f"{number} {name}" for name, number in _waits(row).items())
    verdict = "; ".join(row.problems) or "no race"
    return f"{row.cell.name}: {verdict}; waits per {counts}"


def markdown(rows: list[Row], kept: str = "") -> str:
    """Return docs/host_waits.md; what `kept`, an earlier one, says of other cells stays."""
    ours = {row.cell.name: _line(row) for row in rows}
    lines = {match[1]: match[0] for match in re.finditer(r"^\| (\S+) \|.*\|$", kept, re.MULTILINE)}
    lines = {**lines, **ours}
    names = [name for name in (cell.name for cell in all_cells()) if name in lines]
    text = [
        "# Waits of the host",
        "",
        *_ABOUT,
        "",
        made_with(),
        "",
        "## How many",
        "",
        "Of rank 0: per micro-batch, per step beside these, and for each line of metrics.jsonl.",
        "",
        "| run | optimizer | micro-batch | step | log line | races |",
        "|---|---|---:|---:|---:|---:|",
        *(lines[name] for name in names),
    ]
    return "\n".join([*text, "", *_places(rows, kept, names), "", *_own(), ""])


def made_with() -> str:
    """Return the line that says with which versions the table was made."""
    return f"With {versions()}."


def _line(row: Row) -> str:
    if not row.ranks:
        why = f"not run: {row.skipped}" if row.skipped else "failed"
        return f"| {row.cell.name} | {why} | | | | |"
    counts = " | ".join(_waits(row).values())
    races = sum(row.races.values()) + sum(row.reuses.values())
    return f"| {row.cell.name} | {row.ranks[0].optimizer} | {counts} | {races} |"


def _waits(row: Row) -> dict[str, str]:
    seen = row.ranks[0]
    in_step = {phase: sum(w.count for w in hot(seen.waits, phase)) for phase in (*_WHEN, "log")}
    return {
        "micro-batch": f"{in_step['micro-batches'] / seen.micro_batches:g}",
        "step": str(in_step["data"] + in_step["step"] + in_step["verdict"]),
        "log line": str(in_step["log"]),
    }


def _places(rows: Iterable[Row], kept: str, names: list[str]) -> list[str]:
    runs: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for match in re.finditer(r"^\| `(.+?)` \| (.+?) \| (.+?) \| (.+) \|$", kept, re.MULTILINE):
        place, kind, when, cells = match.groups()
        for name, count in re.findall(r"([^ ,]+)(?: \((\d+)\))?", cells):
            runs[when, place, kind][name] = int(count or 1)
    for row in rows:
        for cells in runs.values():
            cells.pop(row.cell.name, None)
        for wait in hot(row.ranks[0].waits) if row.ranks else ():
            when = _WHEN.get(wait.phase, "log line")
            runs[when, wait.place, wait.kind][row.cell.name] += wait.count
    lines = [
        "## Where",
        "",
        "| line | waits for | in each | runs (times in a step) |",
        "|---|---|---|---|",
    ]
    for (when, place, kind), cells in sorted(runs.items(), key=lambda item: item[0][1]):
        if shown := ", ".join(_counted(name, cells[name]) for name in names if cells[name]):
            lines.append(f"| `{place}` | {kind} | {when} | {shown} |")
    return lines


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{name} ({count})"


def _own() -> list[str]:
    lines = [
        "## The harness's own",
        "",
        "One transfer for each log line, and where something has to be known on the host:",
        "",
    ]
    return [*lines, *(f"- `{file}`: {why}." for (_, file), why in DECIDES.items())]
