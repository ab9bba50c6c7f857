"""Check on a simulated device that no stream or host access races, and where the host waits.

    python -m tests.gates.check_streams                      # a few runs
    python -m tests.gates.check_streams --full --markdown docs/host_waits.md
    python -m tests.gates.check_streams --cells zero2-discard
    python -m tests.gates.check_streams --self-test          # without synchronize(): races show

Real runs on CPU ranks, whose device has streams and events with vector clocks
(tests/gates/streams/). Exit code 1 if memory is accessed without an order or reused too early, or
if the harness waits in a step without need.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from harness.launch.fork_server import Zygote
from tests.gates.defects import STREAMS, UNSYNCHRONIZED
from tests.gates.matrix import chosen, matrix_arguments, results
from tests.gates.streams.cells import BETWEEN_STEPS, all_cells, covering_cells
from tests.gates.streams.run import DECIDES, Row, between, hot, prepare, row_of
from tools.made_with import versions


def main() -> int:
    """Run the command; return its exit code."""
    args = matrix_arguments(
        __doc__, "the runs", lambda parser: parser.add_argument("--markdown", type=Path)
    )
    cells = chosen(args, all_cells(), covering_cells())
    defect = UNSYNCHRONIZED if args.self_test else None
    if defect:
        cells = [*STREAMS[defect].cells]
    with results(args.out, "runs") as folder, Zygote() as zygote:
        prepare(folder)
        rows = []
        for cell in cells:
            rows.append(row_of(zygote, cell, folder, defect))
            print(terminal_line(rows[-1]), flush=True)
    if defect:
        missed = [row.cell.name for row in rows if not row.races]
        print(f"{len(rows)} runs whose device is never waited for, {len(missed)} missed", *missed)
        return 1 if missed else 0
    if args.markdown:
        args.markdown.write_text(markdown(rows))
    failed = [row for row in rows if row.problems]
    print(f"{len(rows)} runs, {len(failed)} with races or waits of the harness")
    return 1 if failed else 0


_PAGE = Path(__file__).with_name("streams") / "page.md"
_WHEN = {"data": "step", "micro-batches": "micro-batch", "step": "step", "verdict": "step"}


def terminal_line(row: Row) -> str:
    """Return a line about one cell."""
    if row.skipped:
        return f"{row.cell.name}: not run: {row.skipped}"
    if row.failure:
        return row.failure
    counts = ", ".join(f"{number} {name}" for name, number in _waits(row).items())
    verdict = "; ".join(row.problems) or "no race"
    return f"{row.cell.name}: {verdict}; waits per {counts}"


def markdown(rows: list[Row]) -> str:
    """Return the content of docs/host_waits.md."""
    return _PAGE.read_text(encoding="utf-8").format(
        versions=versions(),
        runs="\n".join(map(_line, rows)),
        between="\n".join(_between(row) for row in rows if row.cell in BETWEEN_STEPS),
        places="\n".join(_places(rows)),
        own="\n".join(f"- `{file}`: {why}." for (_, file), why in DECIDES.items()),
    )


def _line(row: Row) -> str:
    if not row.ranks:
        why = f"not run: {row.skipped}" if row.skipped else "failed"
        return f"| {row.cell.name} | {why} | | | | |"
    counts = " | ".join(_waits(row).values())
    races = sum(row.races.values()) + sum(row.reuses.values())
    return f"| {row.cell.name} | {row.ranks[0].optimizer} | {counts} | {races} |"


def _between(row: Row) -> str:
    (seen,) = row.ranks or [None]
    if seen is None:
        return f"| {row.cell.name} | failed | | | |"
    pairs = [(n.get("micro-batches", 0), between(n)) for n in (seen.kernels, seen.moved)]
    (kernels, bytes_moved), names = pairs, row.cell.name
    return (
        f"| {names} | {kernels[0]} | {bytes_moved[0]:.1f} | {kernels[1]} | {bytes_moved[1]:.1f} |"
    )


def _waits(row: Row) -> dict[str, str]:
    seen = row.ranks[0]
    in_step = {phase: sum(w.count for w in hot(seen.waits, phase)) for phase in (*_WHEN, "log")}
    return {
        "micro-batch": f"{in_step['micro-batches'] / seen.micro_batches:g}",
        "step": str(in_step["data"] + in_step["step"] + in_step["verdict"]),
        "log line": str(in_step["log"]),
    }


def _places(rows: list[Row]) -> Iterator[str]:
    runs: dict[tuple[str, str, str], dict[str, int]] = defaultdict(Counter)
    for row in rows:
        for wait in hot(row.ranks[0].waits) if row.ranks else ():
            when = _WHEN.get(wait.phase, "log line")
            runs[wait.place, wait.kind, when][row.cell.name] += wait.count
    for (place, kind, when), counts in sorted(runs.items(), key=lambda item: item[0][0]):
        shown = [name if n == 1 else f"{name} ({n})" for name, n in counts.items()]
        yield f"| `{place}` | {kind} | {when} | {', '.join(shown)} |"


if __name__ == "__main__":
    sys.exit(main())
