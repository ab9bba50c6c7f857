"""Outcomes of the inputs by kind: exit codes and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from harness.errors import ExitCode
from tests.fuzz.fuzzer import Tried
from tests.fuzz.kinds.table import KINDS
from tests.fuzz.rule import EXECUTED, HANG, TRACEBACK

_CODES = {code: str(int(code)) for code in ExitCode}
_COLUMNS: dict[str, Callable[[Tried], bool]] = {
    "inputs": lambda one: True,
    **{name: lambda one, code=code: one.code == code for code, name in _CODES.items()},
    "other": lambda one: one.code not in _CODES,
    "tracebacks": lambda one: TRACEBACK in kinds_of(one),
    "hangs": lambda one: HANG in kinds_of(one),
    "executed": lambda one: EXECUTED in kinds_of(one),
    "other faults": lambda one: bool(kinds_of(one) - {TRACEBACK, HANG, EXECUTED}),
}
_REFUSALS = (ExitCode.BAD_CONFIG, ExitCode.CANNOT_SAVE, ExitCode.NO_CHECKPOINT)
_FEW = 30  # below, shares say nothing


def kinds_of(one: Tried) -> set[str]:
    """The kinds of its faults."""
    return {fault.kind for fault in one.faults}


def counted(results: Iterable[Tried]) -> dict[str, Counter[str]]:
    """By kind of input, in the order of the table: how many are in each column."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    for one in results:
        counts[one.name.kind].update(name for name, is_so in _COLUMNS.items() if is_so(one))
    return {name: count for name, count in counts.items() if count["inputs"]}


def table(counts: dict[str, Counter[str]]) -> str:
    """A line for each kind, and their sums, as Markdown."""
    rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
    lines = [
        f"| {'kind':12} | " + " | ".join(f"{name:>{_width(name)}}" for name in _COLUMNS) + " |",
        "|---|" + "---:|" * len(_COLUMNS),
    ]
    for name, count in rows:
        cells = (f"{count[column]:>{_width(column)},}" for column in _COLUMNS)
        lines.append(f"| {name:12} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _width(column: str) -> int:
    return max(len(column), 5)


def unbalanced(counts: dict[str, Counter[str]]) -> list[str]:
    """Kinds that hardly anything passes, or hardly anything fails: they prove nothing."""
    problems = []
    for name, count in counts.items():
        kind, inputs = KINDS[name], count["inputs"]
        ends = {
            "accepted": (count[_CODES[ExitCode.DONE]], kind.accepted),
            "refused": (sum(count[_CODES[code]] for code in _REFUSALS), kind.refused),
        }
        if inputs >= _FEW:
            problems += [
                f"{name}: {number} of {inputs} are {end}, less than {least:.0%}"
                for end, (number, least) in ends.items()
                if number < least * inputs
            ]
    return problems
