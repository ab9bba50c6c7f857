"""Shared parts of tools that fill a table of cells: arguments, kept results, self-tests."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from harness.errors import ExitCode
from harness.terminal import HelpFormatter
from tools.made_with import PACKAGES


class Row(Protocol):
    """The verdict on one cell."""

    @property
    def failures(self) -> list[str]:
        """What differs by more than is allowed."""

    def line(self) -> str:
        """Return a line about it."""


class Named(Protocol):
    """A cell that has a name."""

    @property
    def name(self) -> str:
        """Name of the cell, in arguments and tables."""


C = TypeVar("C", bound=Named)


def matrix_arguments(
    description: str | None,
    kept: str,
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    argv: list[str] | None = None,
) -> argparse.Namespace:
    """Parse the command line, or `argv`.

    `kept`: the content of --out. `more` adds further arguments.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--full", action="store_true", help="every cell, not a covering set")
    some.add_argument("--cells", nargs="+", metavar="CELL", help="only these")
    parser.add_argument("--self-test", action="store_true", help="plant defects; all must show")
    parser.add_argument("--out", type=Path, help=f"keep {kept} here, to resume")
    more(parser)
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace, every: Sequence[C], covering: Sequence[C]) -> list[C]:
    """Return the requested cells. Exits with code 2 for a cell that does not exist."""
    if args.full:
        return [*every]
    if not args.cells:
        return [*covering]
    by_name = {cell.name: cell for cell in every}
    unknown = [name for name in args.cells if name not in by_name]
    if unknown:
        refuse(f"--cells: no such cell: {', '.join(unknown)}; for example {next(iter(by_name))}")
    return [by_name[name] for name in args.cells]


@contextmanager
def results(out: Path | None, kept: str, *packages: str) -> Iterator[Path]:
    """Yield the folder of --out, which must hold results of these versions, or a temporary one."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        made = {name: version(name) for name in (*PACKAGES, *packages)}
        path = folder / "made-with.json"
        if path.exists() and json.loads(path.read_text()) != made:
            refuse(f"--out: {folder} holds {kept} of other versions: remove it, or name another")
        path.write_text(json.dumps(made))
        yield folder


def refuse(problem: str) -> NoReturn:
    """Print a problem, and exit with the code of a wrong argument."""
    print(problem, file=sys.stderr)
    raise SystemExit(int(ExitCode.BAD_CONFIG))


class Trial(NamedTuple):
    """A cell with a planted defect or none, and the folder of its result."""

    cell: Any
    defect: str | None
    folder: str


def self_test(
    defects: Mapping[str, Sequence[Any]], compared: Callable[[list[Trial]], Iterable[Row]]
) -> int:
    """Plant each defect in its cells, and nothing in all of them; return 0 if all defects showed in
    every cell and there was no false alarm.

    `compared` returns the row of each trial.
    """
    cells = dict.fromkeys(cell for several in defects.values() for cell in several)
    planted = [(None, [*cells]), *defects.items()]
    trials = [
        Trial(cell, defect, f"defect-{number}")
        for number, (defect, several) in enumerate(planted)
        for cell in several
    ]
    missed = []
    for trial, row in zip(trials, compared(trials), strict=True):
        print(f"planted: {trial.defect or 'nothing'}\n  {row.line()}", flush=True)
        if bool(row.failures) != bool(trial.defect):
            missed.append(f"{trial.defect or 'a difference without any defect'}: {trial.cell.name}")
    print(*missed, sep="\n", end="\n" if missed else "")
    print(
        f"{len(defects)} defects planted in {len(trials) - len(cells)} cells, {len(missed)} missed"
    )
    return 1 if missed else 0
