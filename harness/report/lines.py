"""Metrics lines of a run: all lines of a short file, and of a long one those that a chart needs.

A chart shows a thousand points, but a long run has a million lines, so a long file is read in
ranges. Each range keeps two evenly chosen lines, those with the lowest and highest value of each
metric that may jump, so that no spike is lost, and the first ones with an evaluation or a probe.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.errors import Unusable
from harness.files.regular_file import open_regular

Line = dict[str, Any]

WHOLE_BYTES = 2**23
"""Size up to which every line of a file is kept (about 25,000 lines)."""
RANGES = 600
_RARE = 6  # lines of a range that are kept for having a key of _RARE_KEYS
_RARE_KEYS = ("eval_loss", "attention_entropy/0", "update_ratio")
_JUMPS = ("loss", "grad_norm", "step_time_s")


@dataclass
class Lines:
    """Lines in the order of their steps, and how they were read."""

    lines: list[Line] = field(default_factory=list)
    """Steps taken again, after a restart or a rollback, replace what they repeat."""
    is_even: list[bool] = field(default_factory=list)
    """For each line: True if it may enter a mean; False if it was kept for its extreme value."""
    is_whole: bool = True
    damaged: int = 0
    """Lines that are not JSON objects with a step."""
    repeated: int = 0
    """Steps that were taken again."""
    problem: str = ""
    _last: int | None = None
    _spacing: int = 1

    def count_repeated(self, line: Line) -> None:
        """Count the logged steps that this line repeats.

        Must see every line of the file. A line with a loss stands for all steps since the previous
        line.
        """
        step = line["step"]
        if self._last is not None:
            gap = step - self._last
            if gap > 0:
                self._spacing = gap
            else:
                self.repeated += (self._spacing if "loss" in line else 0) - gap
        self._last = step

    def add(self, line: Line, is_even: bool) -> None:
        """Add a line; drop the earlier lines of steps that it repeats."""
        step = line["step"]
        while self.lines and self.lines[-1]["step"] >= step:
            last, was_even = self.lines.pop(), self.is_even.pop()
            if last["step"] == step and "loss" not in line:  # an evaluation made after a stop
                line, is_even = {**last, **line}, was_even
        self.lines.append(line)
        self.is_even.append(is_even)


def read_lines(path: Path) -> Lines:
    """Return the lines of a metrics.jsonl, which may be growing, damaged or missing."""
    lines = Lines()
    try:
        with open_regular(path, links=True) as file:
            size = path.stat().st_size
            lines.is_whole = size <= WHOLE_BYTES
            for text in _ranges(file, size, size if lines.is_whole else -(-size // RANGES)):
                _add(lines, [line for each in text.split(b"\n") if (line := _decoded(lines, each))])
    except FileNotFoundError:
        lines.problem = "metrics.jsonl does not exist: no step was logged"
    except (OSError, Unusable) as error:
        lines.problem = str(error)
    return lines


def _ranges(file: IO[bytes], size: int, length: int) -> Iterator[bytes]:
    """Yield whole lines, about `length` bytes at a time; the last line may be half-written."""
    while size > 0 and (text := file.read(min(length, size))):
        text += file.readline() if len(text) < size else b""
        size -= len(text)
        yield text[: text.rfind(b"\n") + 1]


def _decoded(lines: Lines, text: bytes) -> Line | None:
    try:
        line = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        line = ""
    if isinstance(line, dict) and number(line.get("step")) is not None:
        return line
    lines.damaged += line is not None
    return None


def _add(lines: Lines, of_range: list[Line]) -> None:
    """Add all lines of a short file, or the chosen lines of a range."""
    for line in of_range:
        lines.count_repeated(line)
    if lines.is_whole or not of_range:
        places = dict.fromkeys(range(len(of_range)), True)
    else:
        places = _chosen(of_range)
    for place in sorted(places):
        lines.add(of_range[place], places[place])


def _chosen(of_range: list[Line]) -> dict[int, bool]:
    """Return the indices of a range's lines to keep, each with True if it was evenly chosen."""
    last = len(of_range) - 1
    places = {last: False}  # an attempt may end here, and the next one may go back
    for key in _JUMPS:
        values = {
            at: value for at, line in enumerate(of_range) if (value := line.get(key)) is not None
        }
        numbers = {at: value for at, value in values.items() if number(value) is not None}
        if numbers:
            places |= {min(numbers, key=numbers.__getitem__): False}
            places |= {max(numbers, key=numbers.__getitem__): False}
        # "nan", "inf": RunFolder writes numbers that JSON lacks as text.
        places |= dict.fromkeys([at for at in values if at not in numbers][:_RARE], False)
    for key in _RARE_KEYS:
        places |= dict.fromkeys(
            [n for n, line in enumerate(of_range) if key in line][:_RARE], False
        )
    return places | {0: True, last // 2: True}


def number(value: object) -> float | None:
    """Return a finite number read from a record; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None
