"""The interface of a data file format, and the list of lines it could not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.files.first_bytes import why_not_text
from harness.files.pieces import Piece

Records = Iterator[tuple[int, object]]
# Maximum number of problems in a report, and of bad lines before reading stops.
MAX_PROBLEMS, _MAX_LINES = 20, 100_000
_MOST_KINDS, _SHOWN_KINDS = 200, 8
_OTHER = "other problems"
_SKIP = "data.bad_rows=skip leaves out such rows and counts them"


@dataclass
class _Problem:
    """One problem shared by many lines; line 0 stands for a whole file."""

    message: str
    file: Path
    line: int
    count: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def counted_place(self) -> str:
        return self.place if self.count == 1 else f"{self.count:,}, the first {self.place}"


@dataclass
class BadLines:
    """Unreadable lines, grouped by problem. Problems that differ only in numbers are the same."""

    seen: int = 0
    """Number of records read, including bad ones."""
    by_problem: dict[str, _Problem] = field(default_factory=dict)
    limit: float | None = None
    """Maximum number of lines to skip, or below 1 a share of those read; None: skip none."""
    is_cut: bool = False
    """True if reading stopped before the end, as in a dry run."""

    def add(self, file: Path, message: str, line: int = 0, count: int = 1) -> None:
        """Add a problem at a line, or 0 for the whole file; `count` lines share it."""
        key = re.sub(r"0x[0-9a-f]+|\d+", "0", message) if line else f"{file}: {message}"
        if line and key not in self.by_problem and len(self.by_problem) >= _MOST_KINDS:
            key = message = _OTHER
        self.by_problem.setdefault(key, _Problem(message, file, line)).count += count

    def shift(self, lines: int) -> None:
        """Renumber the lines of all problems to follow `lines` earlier lines."""
        for problem in self.by_problem.values():
            problem.line += lines if problem.line else 0

    def merge(self, other: BadLines) -> None:
        """Add the bad lines of `other`, which come after these."""
        self.seen += other.seen
        for key, problem in other.by_problem.items():
            first = self.by_problem.setdefault(key, replace(problem, count=0))
            first.count += problem.count

    def as_json(self) -> dict[str, Any]:
        """Return plain values for from_json."""
        problems = {
            key: [problem.message, str(problem.file), problem.line, problem.count]
            for key, problem in self.by_problem.items()
        }
        return {"seen": self.seen, "by_problem": problems}

    @classmethod
    def from_json(cls, values: dict[str, Any], limit: float | None = None) -> BadLines:
        """Return the bad lines that as_json wrote."""
        problems = {
            key: _Problem(message, Path(file), line, count)
            for key, (message, file, line, count) in values["by_problem"].items()
        }
        return cls(values["seen"], problems, limit)

    @property
    def count(self) -> int:
        """Number of bad lines, not counting files that are bad as a whole."""
        return sum(problem.count for problem in self.by_problem.values() if problem.line)

    @property
    def are_enough(self) -> bool:
        """True if there are enough bad lines to stop reading."""
        files = sum(not problem.line for problem in self.by_problem.values())
        if self.limit is None:
            return len(self.by_problem) >= MAX_PROBLEMS or self.count + files >= _MAX_LINES
        is_over = self.count > self.limit >= 1 or self.seen <= self.count >= _MAX_LINES
        return is_over or files >= MAX_PROBLEMS

    def problems(self) -> list[str]:
        """Return one sentence per problem."""
        return [*map(self._sentence, self.by_problem.values())]

    def require_none(self) -> None:
        """Raise ConfigError if a line is bad, or if more lines are bad than may be skipped."""
        if not self.by_problem:
            return
        if self.limit is None:
            raise ConfigError(self.problems())
        most = self.limit if self.limit >= 1 else Fraction(repr(self.limit)) * self.seen
        if self.count > most and not self.is_cut:  # the rest may be good
            over = f"data.bad_rows_limit is {self.limit:g}, but {self._counted()} rows are bad"
            over += ": fix them, or raise it; the first of each kind:"
            raise ConfigError([over, *self.problems()[:MAX_PROBLEMS]])
        if whole := [problem for problem in self.by_problem.values() if not problem.line]:
            raise ConfigError(map(self._sentence, whole))

    def require_good_rows(self) -> None:
        """Raise ConfigError as require_none does, with data.bad_rows if other rows are good."""
        try:
            self.require_none()
        except ConfigError as error:
            if self.limit is not None or not 0 < self.count < self.seen:
                raise
            raise ConfigError([*error.problems[:-1], f"{error.problems[-1]}; {_SKIP}"]) from None

    def _counted(self) -> str:
        share = f" ({self.count / self.seen:.1%})" if self.seen else ""
        return f"{self.count:,} of {max(self.seen, self.count):,}{share}"

    def skipped_text(self, what: str = "bad rows left out") -> str:
        """Return the counts of skipped lines by kind, with the first of each, or ""."""
        rows = [problem for problem in self.by_problem.values() if problem.line]
        if not rows:
            return ""
        rows.sort(key=lambda problem: -problem.count)
        kinds = [f"{problem.message} ({problem.counted_place})" for problem in rows[:_SHOWN_KINDS]]
        more = f"; {len(rows) - _SHOWN_KINDS} more kinds" if len(rows) > _SHOWN_KINDS else ""
        return f"{what}: {self._counted()}: {'; '.join(kinds)}{more}"

    def skipped(self) -> dict[str, Any]:
        """Return the skipped lines by kind as plain values, for events.jsonl."""
        kinds = [
            {"problem": problem.message, "rows": problem.count, "first": problem.place}
            for problem in self.by_problem.values()
            if problem.line
        ]
        return {"skipped": self.count, "rows": self.seen, "kinds": kinds}

    def _sentence(self, problem: _Problem) -> str:
        if not problem.line:
            return f"data.path: cannot read {problem.file}: {problem.message}"
        if problem.count == 1:
            return f"data.path: {problem.place}: {problem.message}"
        counts = f"{problem.count:,} of {max(self.seen, problem.count):,} lines read"
        return f"data.path: {problem.place}: {problem.message} ({counts}; this is the first)"


def problem_of(error: ValueError) -> str:
    """Return the problem of a record as text; the same problem always gives the same text."""
    if isinstance(error, UnicodeEncodeError):
        return "contains half of a character, as from a cut emoji: surrogates not allowed"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error}"
    return str(error)


def _why_not(file: Path, is_named: bool) -> str:
    """Return why a file is not UTF-8 text; "" without opening it if its suffix names the format."""
    return why_not_text(file) if is_named or not file.suffix else ""


@dataclass(frozen=True)
class DataFormat:
    """A format: its name, suffixes, and functions of one file, which may raise OSError.

    To add one, write a file in harness/files/formats/ that assigns a DataFormat to FORMAT and
    imports libraries only inside functions. Set either `pieces` or `records`.
    """

    name: str
    """Value of data.format."""
    suffixes: frozenset[str]
    """Lower-case suffixes that name the format, such as ".jsonl" or ".jsonl.gz"; "": no suffix."""
    pieces: Callable[[Path, BadLines], Iterator[Piece]] | None = None
    """Yields the documents and adds unreadable lines to the BadLines. Raises UnicodeDecodeError."""
    records: Callable[[Path, BadLines], Records] | None = None
    """Yields (line, record); forms.py determines which columns are the document."""
    bounds: Callable[[Path, int], list[int]] = lambda file, least_bytes: []
    """Returns the bounds of ranges of at least the given number of bytes, ascending, whose records
    can be read separately; empty if the file cannot be divided. Raises OSError."""
    records_between: Callable[[Path, BadLines, int, int], Records] | None = None
    """Yields the records that begin in a byte range (start, stop)."""
    lines_before: Callable[[Path, int], int] | None = None
    """Returns the number of lines before a range, if `records_between` counts from the range's
    first line; None: it counts from the start of the file. Raises OSError."""
    count: Callable[[Path, int], tuple[int, int]] | None = None
    """Returns the number of documents in at most the given number of bytes, and how many of these
    bytes are left; None: each file is a document."""
    why_not: Callable[[Path, bool], str] = _why_not
    """Returns why a file cannot be read, or ""; the second argument is True if data.format names
    the format."""
    note: Callable[[Path], str] = lambda file: ""
    """Returns a remark for the plan on how a file is read, such as its separator; "" without."""
