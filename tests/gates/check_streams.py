"""Does a stream, or the host, overtake another? Does the host wait? On a simulated device.

    python -m tests.gates.check_streams                      # a few runs
    python -m tests.gates.check_streams --full --markdown docs/host_waits.md
    python -m tests.gates.check_streams --cells zero2-discard    # with --markdown the others stay
    python -m tests.gates.check_streams --self-test          # without synchronize(): races show

Real runs on CPU ranks, whose device has streams and events with vector clocks
(tests/gates/streams/). Exit code 1 if memory is used without an order or reused too early, or
where the harness itself waits in a step without need.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness.launch.fork_server import Zygote
from tests.gates.matrix import chosen, matrix_arguments, refuse, same_versions, self_test_result
from tests.gates.streams.cells import CONTROLS, Cell, all_cells, covering_cells
from tests.gates.streams.report import made_with, markdown, terminal_line
from tests.gates.streams.trial import Failed, Row, impossible, prepare, seen


def main() -> int:
    """Command line -> exit code."""
    args = matrix_arguments(__doc__, "the runs", "table of waits")
    cells = chosen(args, all_cells(), covering_cells())
    if args.self_test:
        cells = [cell for cell in all_cells() if cell.name in CONTROLS]
    kept = ""
    if args.markdown and args.cells and args.markdown.exists():
        kept = args.markdown.read_text()
        if made_with() not in kept:
            refuse(f"--markdown: {args.markdown} is of other versions: its cells cannot stay")
    with tempfile.TemporaryDirectory() as scratch, Zygote() as zygote:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        same_versions(folder, "runs")
        prepare(folder)
        rows = []
        for cell in cells:
            rows.append(_tried(zygote, cell, folder, synchronizes=not args.self_test))
            print(terminal_line(rows[-1]), flush=True)
    if args.self_test:
        missed = [
            f"no race without synchronize(): {row.cell.name}" for row in rows if not row.races
        ]
        return self_test_result(missed, f"{len(rows)} runs whose device is never waited for")
    if args.markdown:
        args.markdown.write_text(markdown(rows, kept))
    failed = [row for row in rows if row.problems]
    print(f"{len(rows)} runs, {len(failed)} with races or waits of the harness")
    return 1 if failed else 0


def _tried(zygote: Zygote, cell: Cell, folder: Path, synchronizes: bool) -> Row:
    if problem := impossible(cell):
        return Row(cell, skipped=problem)
    try:
        return Row(cell, seen(zygote, cell, folder, synchronizes))
    except Failed as failed:
        return Row(cell, failure=str(failed))


if __name__ == "__main__":
    sys.exit(main())
