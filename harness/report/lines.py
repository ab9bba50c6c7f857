"""Metrics lines of a run: all of a short file; of a long one, those that a picture needs.

A run of a million logged steps has 340 MB of lines. Decoding all of them takes seconds, a picture
shows a thousand places. So a long file is cut into ranges of bytes; of each range some lines are
decoded, evenly chosen, and those with the lowest and highest value of what may jump, so that no
spike is lost. Lines with an evaluation or a probe are decoded, too.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import Unusable
from harness.files.regular_file import open_regular

Line = dict[str, Any]
MapRanges = Callable[
    [Callable[[tuple[int, int]], list[tuple[bytes, bool]]], Iterable[tuple[int, int]]],
    Iterable[list[tuple[bytes, bool]]],
]

WHOLE_BYTES = 2**23
"""Up to here (about 25,000 lines) every line is decoded."""
RANGES = 600
_SPANS = 8  # groups of ranges, each of which one process may read
_EVEN = 2  # lines of a range that are decoded for being where they are
_MARKED = 6  # at most so many lines of a range for each mark
_MARKS = (b'"eval_loss', b'"attention_entropy', b'"update_ratio')
_TEXT = b'": "'  # "nan", "inf": RunFolder writes what JSON has no number for as text

# Written in this order (run/meter.py): one search finds all three. Nine characters are enough to
# tell which value is the highest, and short numbers are read three times as fast.
_JUMP_NAMES = (b"loss", b"grad_norm", b"step_time_s")
_PLAIN = rb'": ([\d.]{1,9})\d*'
_PLAIN_JUMPS = re.compile(
    rb'"loss%s, "grad_norm%s(?:, "(?!step_t)[^,]*)*, "step_time_s%s' % (_PLAIN, _PLAIN, _PLAIN)
)


@dataclass
class Lines:
    """Lines in the order of their steps, and how they came about."""

    lines: list[Line] = field(default_factory=list)
    """Steps taken again, after a restart or a rollback, replace what they repeat."""
    is_even: list[bool] = field(default_factory=list)
    """For each line: True if it may enter a mean; False if it is there for its extreme value."""
    is_whole: bool = True
    damaged: int = 0
    """Lines that are no JSON object with a step."""
    repeated: int = 0
    """Lines of steps that were taken again."""
    problem: str = ""

    def add(self, line: Line, is_even: bool) -> None:
        """Add a line; drop those of the steps that it repeats."""
        step = line["step"]
        while self.lines and self.lines[-1]["step"] >= step:
            last, was_even = self.lines.pop(), self.is_even.pop()
            if last["step"] == step and "loss" not in line:  # an evaluation made after a stop
                line, is_even = {**last, **line}, was_even
            else:
                self.repeated += 1
        self.lines.append(line)
        self.is_even.append(is_even)


def read_lines(path: Path, map_ranges: MapRanges = map) -> Lines:
    """Return the lines of a metrics.jsonl, which may be growing, damaged or missing.

    `map_ranges`: a map, as of several processes, which share a long file.
    """
    lines = Lines()
    try:
        with open_regular(path, links=True) as file:
            size = path.stat().st_size
            if size <= WHOLE_BYTES:
                for text in file.read(WHOLE_BYTES).split(b"\n")[:-1]:
                    _decode(lines, text, True)
                return lines
        lines.is_whole = False
        ends = [size * number // _SPANS for number in range(_SPANS + 1)]
        for texts in map_ranges(functools.partial(_chosen, path, size), itertools.pairwise(ends)):
            for text, is_even in texts:
                _decode(lines, text, is_even)
    except FileNotFoundError:
        lines.problem = "metrics.jsonl does not exist: no step was logged"
    except (OSError, Unusable) as error:
        lines.problem = str(error)
    return lines


def _decode(lines: Lines, text: bytes, is_even: bool) -> None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if isinstance(line, dict) and number(line.get("step")) is not None:
        lines.add(line, is_even)
    elif text.strip():
        lines.damaged += 1


def _chosen(path: Path, size: int, span: tuple[int, int]) -> list[tuple[bytes, bool]]:
    """Return the chosen lines of the ranges of those that begin in a span of bytes, in order; a
    range ends with a line.
    """
    length, (begin, end), chosen = -(-size // RANGES), span, list[tuple[bytes, bool]]()
    with open_regular(path, links=True) as file:
        if begin:
            file.seek(begin - 1)
            file.readline()
        while (at := file.tell()) < end and (text := file.read(min(length, end - at))):
            text += file.readline()
            text = text[: text.rfind(b"\n") + 1]  # the last line may be half-written
            if text:
                chosen += _lines_at(text, _places(text))
    return chosen


def _places(text: bytes) -> dict[int, bool]:
    """Return the places in a range at which its chosen lines are; True for those evenly chosen."""
    places = dict.fromkeys(_extremes(text), False)
    for mark in _MARKS:
        places |= dict.fromkeys(_first_of(mark, text), False)
    places |= {len(text) * number // _EVEN: True for number in range(_EVEN)}
    places[len(text) - 1] = False  # an attempt may end here, and the next one go back
    return places


def _extremes(text: bytes) -> Iterator[int]:
    """Yield the places of the lowest and the highest value of what may jump."""
    matches = _PLAIN_JUMPS.findall(text)
    columns: list[tuple[bytes, ...]] = list(zip(*matches, strict=True))
    if len(matches) < text.count(b"\n"):  # null, "nan", 1e-05 or missing, somewhere
        columns = [tuple(re.findall(rb'"%s": ([^,}\n]+)' % name, text)) for name in _JUMP_NAMES]
        yield from _first_of(_TEXT, text)
    for name, texts in zip(_JUMP_NAMES, columns, strict=True):
        try:
            values = list(map(float, texts))
        except ValueError:
            texts = tuple(text for text in texts if _float(text) is not None)
            values = list(map(float, texts))
        for value in (min(values), max(values)) if values else ():
            yield text.find(b'"%s": %s' % (name, texts[values.index(value)]))


def _first_of(mark: bytes, text: bytes) -> Iterator[int]:
    """Yield the place of a mark in the first lines of a range that have it."""
    at = text.find(mark)
    for _ in range(_MARKED):
        if at < 0:
            return
        yield at
        at = text.find(mark, text.find(b"\n", at))


def _float(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _lines_at(text: bytes, places: dict[int, bool]) -> list[tuple[bytes, bool]]:
    """Return the lines that hold these places, each once, in order."""
    chosen: dict[int, bool] = {}
    for place, is_even in places.items():
        begin = text.rfind(b"\n", 0, place) + 1
        chosen[begin] = is_even or chosen.get(begin, False)
    return [(text[at : text.find(b"\n", at)], chosen[at]) for at in sorted(chosen)]


def number(value: object) -> float | None:
    """Return a finite number read from a record; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None
