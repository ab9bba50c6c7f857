"""A format of data files: what the harness asks of it, and where it reports unreadable lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.files.first_bytes import first_lines, why_not_text
from harness.files.pieces import Piece

Records = Iterator[tuple[int, object]]
# Most problems in a report, and bad lines before reading stops.
MAX_PROBLEMS, _MAX_LINES = 20, 100_000
_MOST_KINDS, _SHOWN_KINDS = 200, 8
_OTHER = "other problems"
SKIP = "data.bad_rows=skip leaves such rows out, and counts them"


@dataclass
class _Problem:
    """Equal problems of many lines; line 0 is a whole file."""

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
    """Unreadable lines, by problem; problems that differ in numbers only are equal."""

    seen: int = 0
    """Records read, bad ones too."""
    by_problem: dict[str, _Problem] = field(default_factory=dict)
    limit: float | None = None
    """Most lines that are left out: below 1 a share of those read, else a number; None: none is."""

    def add(self, file: Path, message: str, line: int = 0, count: int = 1) -> None:
        """Add a line, or 0 for the whole file, with its problem; `count` lines that share it."""
        key = re.sub(r"0x[0-9a-f]+|\d+", "0", message) if line else f"{file}: {message}"
        if line and key not in self.by_problem and len(self.by_problem) >= _MOST_KINDS:
            key = message = _OTHER
        self.by_problem.setdefault(key, _Problem(message, file, line)).count += count

    def shift(self, lines: int) -> None:
        """Count the lines of all problems from so many lines before."""
        for problem in self.by_problem.values():
            problem.line += lines if problem.line else 0

    def merge(self, other: BadLines) -> None:
        """Add those that were met after these."""
        self.seen += other.seen
        for key, problem in other.by_problem.items():
            first = self.by_problem.setdefault(key, replace(problem, count=0))
            first.count += problem.count

    def as_json(self) -> dict[str, Any]:
        """Return plain values for from_json."""
        problems = {
            key: [of.message, str(of.file), of.line, of.count]
            for key, of in self.by_problem.items()
        }
        return {"seen": self.seen, "by_problem": problems}

    @classmethod
    def from_json(cls, values: dict[str, Any], limit: float | None = None) -> BadLines:
        """Return the lines that as_json described."""
        problems = {
            key: _Problem(message, Path(file), line, count)
            for key, (message, file, line, count) in values["by_problem"].items()
        }
        return cls(values["seen"], problems, limit)

    @property
    def count(self) -> int:
        """Bad lines, without files that are bad as a whole."""
        return sum(problem.count for problem in self.by_problem.values() if problem.line)

    @property
    def are_enough(self) -> bool:
        """True if the report is long enough to stop reading."""
        files = sum(not problem.line for problem in self.by_problem.values())
        if self.limit is None:
            return len(self.by_problem) >= MAX_PROBLEMS or self.count + files >= _MAX_LINES
        is_over = self.count > self.limit >= 1 or self.seen <= self.count >= _MAX_LINES
        return is_over or files >= MAX_PROBLEMS

    def problems(self) -> list[str]:
        """Return a sentence for each problem."""
        return [self._sentence(problem) for problem in self.by_problem.values()]

    def require_none(self) -> None:
        """Raise ConfigError if a line is bad, or more of them than are left out."""
        if not self.by_problem:
            return
        if self.limit is None:
            raise ConfigError(self.problems())
        whole = [self._sentence(of) for of in self.by_problem.values() if not of.line]
        most = self.limit if self.limit >= 1 else Fraction(repr(self.limit)) * self.seen
        if self.count > most:
            over = f"data.bad_rows_limit is {self.limit:g}, but the bad rows are {self._counted()}"
            over += ": mend them, or raise it; the first of each kind:"
            raise ConfigError([over, *self.problems()[:MAX_PROBLEMS]])
        if whole:
            raise ConfigError(whole)

    def _counted(self) -> str:
        share = f" ({self.count / self.seen:.1%})" if self.seen else ""
        return f"{self.count:,} of {max(self.seen, self.count):,}{share}"

    def skipped_text(self, what: str = "bad rows left out") -> str:
        """Return how many lines are left out, by kind, with the first of each; "" without any."""
        rows = [of for of in self.by_problem.values() if of.line]
        if not rows:
            return ""
        rows.sort(key=lambda of: -of.count)
        kinds = [f"{of.message} ({of.counted_place})" for of in rows[:_SHOWN_KINDS]]
        more = f"; {len(rows) - _SHOWN_KINDS} more kinds" if len(rows) > _SHOWN_KINDS else ""
        return f"{what}: {self._counted()}: {'; '.join(kinds)}{more}"

    def skipped(self) -> dict[str, Any]:
        """Return the same as plain values, for the record of a run."""
        kinds = [
            {"problem": of.message, "rows": of.count, "first": of.place}
            for of in self.by_problem.values()
            if of.line
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
    """Return the problem of a record in words; equal problems have equal ones."""
    if isinstance(error, UnicodeEncodeError):
        return "holds half of a character, as of an emoji that was cut: surrogates not allowed"
    if isinstance(error, UnicodeDecodeError):
        return f"is no UTF-8 text: {error}"
    return str(error)


def _why_not(file: Path, is_named: bool) -> str:
    """Return why a file is no UTF-8 text; "" unopened if its suffix names the format."""
    return why_not_text(file) if is_named or not file.suffix else ""


@dataclass(frozen=True)
class DataFormat:
    """A format: its name and suffixes, and functions of one file, which may raise OSError.

    To add one, write a file in harness/files/formats/ that assigns a DataFormat to FORMAT; it
    imports libraries inside its functions. It has either `pieces` or `records`.
    """

    name: str
    """Value of `data.format`."""
    suffixes: frozenset[str]
    """Suffixes that name the format, such as ".jsonl" or ".jsonl.gz", in lower case; "": none."""
    begin: Callable[[Path], str] | None = None
    """Return how the first document begins, as begins() words it; None: its first record says it.
    Raises Unusable."""
    pieces: Callable[[Path, BadLines], Iterator[Piece]] | None = None
    """Yield the documents, and add unreadable lines to the BadLines. Raises UnicodeDecodeError."""
    records: Callable[[Path, BadLines], Records] | None = None
    """Yield (line, record): forms.py says which of its columns are the document."""
    bounds: Callable[[Path, int], list[int]] = lambda file, least_bytes: []
    """Return the bounds of ranges of at least so many bytes, in ascending order, whose records can
    be read apart; none if the file cannot be divided. Raises OSError."""
    records_between: Callable[[Path, BadLines, int, int], Records] | None = None
    """Yield those of the records that begin in a range of bytes (start, stop)."""
    lines_before: Callable[[Path, int], int] | None = None
    """Return the lines before a range, from whose first line `records_between` counts; None: it
    counts from the file's first. Raises OSError."""
    count: Callable[[Path, int], tuple[int, int]] | None = None
    """Return the documents in a number of bytes, and the bytes left; None: a file is a document."""
    why_not: Callable[[Path, bool], str] = _why_not
    """Return why a file cannot be read, "" if it can; True: `data.format` names the format."""
    note: Callable[[Path], str] = lambda file: ""
    """Return what the plan says about how a file is read, such as its separator; "" if nothing."""
    excerpt: Callable[[Path, int], bytes] = first_lines
    """Return the content of a file of about so many bytes with the first documents."""
