"""The harness's own cost per rank as Markdown: measured for some ranks, extrapolated to more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.proofs.own_cost.measure import TENSORS, Row, agreement, heartbeat, measured

FURTHER = (1_024, 4_096, 16_384)
_REPOSITORY = Path(__file__).resolve().parents[3]
_TABLES = {
    "calls": "Calls of a file system (open, stat, list, rename, remove, sync)",
    "bytes": "Bytes that a rank receives from others, or reads of an index",
    "milliseconds": "Milliseconds of a processor on rank 0, the simulation's own included",
}


def own_cost(sizes: Sequence[int], gloo: Sequence[int]) -> Iterator[str]:
    """Yield the lines. Measures `sizes` ranks as threads, `gloo` ranks as processes."""
    rows = {ranks: list(measured(ranks)) for ranks in sizes}
    yield "## The harness's own cost"
    yield ""
    yield "Ranks are threads of one process that call the harness's own code, of a model of"
    yield f"{TENSORS} tensors of which each rank has a fragment, as under ZeRO 3: bytes of saves"
    yield "and of the index grow with the tensors, too. Numbers in *italics* were not measured:"
    yield f"they are extrapolated on a straight line through {sizes[-2]} and {sizes[-1]} ranks."
    yield ""
    for of, title in _TABLES.items():
        yield from _table(title, of, rows)
    yield from _heartbeats(sizes)
    yield from _agreement(sizes, gloo)


def _table(title: str, of: str, rows: dict[int, list[Row]]) -> Iterator[str]:
    sizes = [*rows]
    yield f"### {title}"
    yield ""
    yield f"| | rank | {' | '.join(f'{n:,}' for n in (*sizes, *FURTHER))} | grows |"
    yield f"|---|---|{'---:|' * (len(sizes) + len(FURTHER))}---|"
    for number, first in enumerate(rows[sizes[0]]):
        for who, name in enumerate(("0", "another")):
            values = [getattr(rows[n][number], of)[who] for n in sizes]
            if not any(values):
                continue
            further = beyond(values[-2:], sizes[-2:], FURTHER)
            cells = [_number(v) for v in values] + [f"*{_number(v)}*" for v in further]
            if who and sizes[0] == 1:
                cells[0] = ""
            yield f"| {first.what} | {name} | {' | '.join(cells)} | {_growth(values[-2:])} |"
    yield ""


def beyond(values: Sequence[float], sizes: Sequence[int], further: Sequence[int]) -> list[float]:
    """Return what two values come to at further sizes, on a straight line; none falls."""
    slope = max(0.0, (values[1] - values[0]) / (sizes[1] - sizes[0]))
    return [values[1] + slope * (size - sizes[1]) for size in further]


def _growth(values: Sequence[float]) -> str:
    return "no" if values[1] < 1.05 * values[0] else "with N"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _heartbeats(sizes: Sequence[int]) -> Iterator[str]:
    yield "### Heartbeats"
    yield ""
    yield "All that every rank writes all the time. Their interval grows with the ranks: a file"
    yield "system that all jobs share sees at most 64 a second. One of each job was counted."
    yield ""
    yield "| ranks | s between a rank's | calls a second of all | bytes a second | a hang |"
    yield "|---:|---:|---:|---:|---:|"
    for ranks in (*sizes, *FURTHER):
        beat = heartbeat(ranks)
        yield (
            f"| {ranks:,} | {beat.tick_s:.0f} | {beat.calls_per_s:.0f} | {beat.bytes_per_s:,.0f} | "
            f"reported in {beat.report_s:.0f} s |"
        )
    yield ""


def _agreement(sizes: Sequence[int], gloo: Sequence[int]) -> Iterator[str]:
    yield "### Agreement on a stop"
    yield ""
    yield "8 bytes a step, read in a later one. gloo's reduction is a ring: an answer passes"
    yield "twice as many ranks as there are, one after the other, and each rank is connected to"
    yield "each. More than 64 ranks therefore agree in rows and, a step later, in columns:"
    yield ""
    yield "| ranks | connections, one group | rows, columns | ranks passed | rows, columns |"
    yield "|---:|---:|---:|---:|---:|"
    for ranks in (*sizes, *FURTHER):
        others, passed = agreement(ranks)
        yield f"| {ranks:,} | {ranks - 1:,} | {others:,} | {2 * (ranks - 1):,} | {passed:,} |"
    yield ""
    yield "Real gloo ranks, processes that take turns on the cores of this machine (a rank also"
    yield "has a socket to itself in every group):"
    yield ""
    yield "| ranks | sockets, one group | rows, columns | ms of an answer | rows, columns |"
    yield "|---:|---:|---:|---:|---:|"
    for ranks in gloo:
        command = [sys.executable, "-m", "tools.proofs.own_cost.agreement", str(ranks)]
        done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=True)
        (one, one_ms), (table, table_ms) = json.loads(done.stdout).values()
        yield f"| {ranks} | {one} | {table} | {one_ms:.1f} | {table_ms:.1f} |"
    yield ""
