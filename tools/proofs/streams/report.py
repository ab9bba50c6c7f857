"""The simulator's results as text: waits of the host by JSON and line, races if there are any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tools.made_with import versions
from tools.proofs.streams.verdict import DECIDES, Row, hot
from tools.proofs.streams.worker import Wait

_ABOUT = """\
A host that waits for its GPU launches nothing meanwhile. These are all waits of one optimizer step,
by simulation: real runs on CPU ranks whose device has streams and events with vector clocks, and
which sees every operation's reads and writes (`python tools/proofs/check_streams.py --full`). The
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


def markdown(rows: list[Row]) -> str:
    """Return docs/host_waits.md."""
    lines = [
        "# Waits of the host",
        "",
        *_ABOUT,
        "",
        f"With {versions()}.",
        "",
        "## How many",
        "",
        "Of rank 0: per micro-batch, per step beside these, and for each line of metrics.jsonl.",
        "",
        "| run | optimizer | micro-batch | step | log line | races |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        if not row.ranks:
            why = f"not run: {row.skipped}" if row.skipped else "failed"
            lines.append(f"| {row.cell.name} | {why} | | | | |")
            continue
        counts = " | ".join(_waits(row).values())
        races = sum(row.races.values()) + sum(row.reuses.values())
        lines.append(f"| {row.cell.name} | {row.ranks[0].optimizer} | {counts} | {races} |")
    return "\n".join([*lines, "", *_places(rows), "", *_own(), ""])


def _waits(row: Row) -> dict[str, str]:
    seen = row.ranks[0]
    in_step = {phase: sum(w.count for w in hot(seen.waits, phase)) for phase in (*_WHEN, "log")}
    return {
        "micro-batch": f"{in_step['micro-batches'] / seen.micro_batches:g}",
        "step": str(in_step["data"] + in_step["step"] + in_step["verdict"]),
        "log line": str(in_step["log"]),
    }


def _places(rows: Iterable[Row]) -> list[str]:
    runs: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        for wait in hot(row.ranks[0].waits) if row.ranks else ():
            runs[_WHEN.get(wait.phase, "log line"), wait.place, wait.kind].append(
                _counted(row, wait)
            )
    lines = [
        "## Where",
        "",
        "| line | waits for | in each | runs (times in a step) |",
        "|---|---|---|---|",
    ]
    for (when, place, kind), names in sorted(runs.items(), key=lambda item: item[0][1]):
        lines.append(f"| `{place}` | {kind} | {when} | {', '.join(names)} |")
    return lines


def _counted(row: Row, wait: Wait) -> str:
    return row.cell.name if wait.count == 1 else f"{row.cell.name} ({wait.count})"


def _own() -> list[str]:
    lines = [
        "## The harness's own",
        "",
        "One transfer for each log line, and where something has to be known on the host:",
        "",
    ]
    return [*lines, *(f"- `{file}`: {why}." for (_, file), why in DECIDES.items())]
