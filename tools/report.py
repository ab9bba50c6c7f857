"""Show runs: one as a page, several side by side, or all of them.

    python tools/report.py runs/first                    # writes runs/first/report.html
    python tools/report.py runs/a runs/b --out ab.html   # overlaid; what differs; which is best
    python tools/report.py                               # all of runs/, into runs/report.html
    python tools/report.py runs/first --plot curve.svg   # a picture, .svg or .png

The page is one file that opens anywhere, without a network. A run may be in progress, interrupted
or damaged: the page shows whatever exists. Exit code 0, or 2 if there is no run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.report.compare import compare_page_of
from harness.report.page import page_of
from harness.report.run_record import RunRecord, is_run, read
from harness.report.write import NAME, write_page
from harness.terminal import HelpFormatter
from tools.figure import plot_problems, write_plot

ALL = Path("runs")


def main(argv: list[str]) -> int:
    """Run the command: argv -> a page or a plot -> exit code."""
    args = _parser().parse_args(argv)
    try:
        runs = [read(path) for path in _paths(args.runs)]
        if problems := list(plot_problems(args.plot)):
            raise ConfigError(problems)
        if args.plot:
            from tools.reports.plot import drawn

            write_plot(args.plot, drawn(runs))
            return int(ExitCode.DONE)
        out = args.out or _place(args.runs, runs)
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent}")
        write_page(out, _page(args.runs, runs))
    except (ConfigError, OSError) as error:
        print(f"cannot report: {error}", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    print(out)
    return int(ExitCode.DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders (default: all of runs/)")
    parser.add_argument("--out", type=Path, help="page to write")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg|png", help="write a picture instead of a page"
    )
    return parser


def _paths(named: list[Path]) -> list[Path]:
    """Return the run folders. Raises ConfigError for a folder that is not one."""
    if named:
        if problems := [f"{path} is not a run folder" for path in named if not is_run(path)]:
            raise ConfigError(problems)
        return named
    folders = sorted(path for path in ALL.glob("*") if is_run(path)) if ALL.is_dir() else []
    if not folders:
        raise ConfigError(f"there is no run in {ALL.absolute()}: give a run folder")
    return folders


def _place(named: list[Path], runs: list[RunRecord]) -> Path:
    """Return the page's path: in the run's folder, or beside the runs."""
    if len(named) == 1:
        return named[0] / NAME
    return (runs[0].path.parent if named else ALL) / NAME


def _page(named: list[Path], runs: list[RunRecord]) -> str:
    if len(named) == 1:
        return page_of(runs[0])
    return compare_page_of(runs, f"{len(runs)} runs" if named else "All runs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
