"""Shared parts of tools that fill a table of cells: arguments, kept results, self-tests."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from harness.errors import ExitCode
from harness.terminal import HelpFormatter
from tools.made_with import PACKAGES


class Named(Protocol):
    """A cell that has a name."""

    @property
    def name(self) -> str:
        """Name of the cell, in arguments and tables."""
        ...


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


def chosen(args: argparse.Namespace, every: list[C], covering: list[C]) -> list[C]:
    """Return the requested cells. Exits with code 2 for a cell that does not exist."""
    if args.full:
        return every
    if not args.cells:
        return covering
    by_name = {cell.name: cell for cell in every}
    unknown = [name for name in args.cells if name not in by_name]
    if unknown:
        refuse(f"--cells: no such cell: {', '.join(unknown)}; for example {next(iter(by_name))}")
    return [by_name[name] for name in args.cells]


def same_versions(out: Path, kept: str, *more: str) -> None:
    """Exit with code 2 unless the results in `out` are of these packages' versions."""
    made = {name: version(name) for name in (*PACKAGES, *more)}
    path = out / "made-with.json"
    if path.exists() and json.loads(path.read_text()) != made:
        refuse(f"--out: {out} holds {kept} of other versions: remove it, or name another")
    path.write_text(json.dumps(made))


def refuse(problem: str) -> NoReturn:
    """Print a problem, and exit with the code of a wrong argument."""
    print(problem, file=sys.stderr)
    raise SystemExit(int(ExitCode.BAD_CONFIG))


def self_test_result(missed: list[str], planted: str) -> int:
    """Print the missed defects and the number planted; return the exit code."""
    print(*missed, sep="\n", end="\n" if missed else "")
    print(f"{planted}, {len(missed)} missed")
    return 1 if missed else 0


def is_missed(failures: list[str], defect: str | None, cell: Named) -> list[str]:
    """Return a self-test's failures of one cell: an undetected defect, or a false alarm."""
    if bool(failures) == bool(defect):
        return []
    return [f"{defect or 'a difference without any defect'}: {cell.name}"]
