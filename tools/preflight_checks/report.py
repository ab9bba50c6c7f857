"""The report: a row per check, who is meant by it, one verdict."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from harness.errors import ExitCode
from harness.guard.watchdog import ranges

Verdict = Literal["ok", "warn", "FAIL"]
K = TypeVar("K", bound=Hashable)

SLOW = 0.7
"""Below this part of the median a rank, link or node is named: a throttled GPU or a link that fell
back to half its lanes is, the few per cent between healthy ones are not."""
_NAMED = 4  # nodes that are named before the rest is counted
_CHECK_WIDTH, _VERDICT_WIDTH, _TEXT_WIDTH = 20, 9, 90


@dataclass(frozen=True)
class Row:
    """One check."""

    check: str
    verdict: Verdict
    found: str
    """The values, least to most, and who does not fit in."""
    todo: str = ""
    """Advice; empty if all is well."""


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """The rows, then the verdict; `width`: of the terminal that shows it."""
    text_width = _TEXT_WIDTH
    if width is not None:
        text_width = max(20, min(_TEXT_WIDTH, width - _CHECK_WIDTH - _VERDICT_WIDTH))
    lines = [f"{'check':<{_CHECK_WIDTH}}{'verdict':<{_VERDICT_WIDTH}}found, and what to do"]
    for row in rows:
        texts = [row.found, *([f"-> {row.todo}"] if row.todo else [])]
        wrapped = [line for text in texts for line in textwrap.wrap(text, text_width)]
        lines.append(f"{row.check:<{_CHECK_WIDTH}}{row.verdict:<{_VERDICT_WIDTH}}{wrapped[0]}")
        lines += [" " * (_CHECK_WIDTH + _VERDICT_WIDTH) + line for line in wrapped[1:]]
    return "\n".join([*lines, "", f"preflight: {conclusion(rows)}"])


def conclusion(rows: Sequence[Row]) -> str:
    """The verdict over all rows, in a sentence."""
    of = {v: [row.check for row in rows if row.verdict == v] for v in ("warn", "FAIL")}
    warnings = (
        f"{count(len(of['warn']), 'warning')} ({', '.join(of['warn'])})" if of["warn"] else ""
    )
    if of["FAIL"]:
        also = f"; {warnings}" if warnings else ""
        return f"FAIL, do not start: {', '.join(of['FAIL'])}{also}"
    return f"ok to start, {warnings or 'no warnings'}"


def code(rows: Sequence[Row]) -> ExitCode:
    """BAD_CONFIG where something fails: it is never requeued."""
    return ExitCode.BAD_CONFIG if any(r.verdict == "FAIL" for r in rows) else ExitCode.DONE


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The same, for programs."""
    verdict = "FAIL" if code(rows) else "ok"
    return {"verdict": verdict, "code": int(code(rows)), "checks": [asdict(row) for row in rows]}


def count(number: int, noun: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def who(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Ranks by node: "n2 (rank 9), n3 (ranks 16-23)"."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [
        f"{host} ({_ranks(ranks_there)})" for host, ranks_there in list(by_host.items())[:_NAMED]
    ]
    more = len(by_host) - len(named)
    return ", ".join([*named, *([f"and {count(more, 'more node')}"] if more else [])])


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def span(values: Iterable[float], unit: str, form: str = ".1f") -> str:
    """ "61.2 to 63.0 GiB"; one number where both round to it."""
    texts = [format(value, form) for value in sorted(values)]
    ends = dict.fromkeys((texts[0], texts[-1]))
    return f"{' to '.join(ends)} {unit}"


def slow(values: Mapping[K, float]) -> list[K]:
    """The keys of what is slower than SLOW times the median; of two, than the faster one."""
    if not values:
        return []
    limit = SLOW * statistics.median_high(values.values())
    return [key for key, value in values.items() if value < limit]


def by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks that say each text."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def grouped(ranks_of: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """Return the first few texts with their ranks, and a count of the others."""
    named = [f"{who(ranks, hosts)}: {text}" for text, ranks in list(ranks_of.items())[:_NAMED]]
    more = len(ranks_of) - len(named)
    return "; ".join([*named, *([f"and {count(more, 'other text')}"] if more else [])])


def odd_ones(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of every value but the most common one, which is the lowest rank's in a tie."""
    ranks_of = by_text(sorted(values.items()))
    common = max(ranks_of, key=lambda value: len(ranks_of[value]), default="")
    return {value: ranks for value, ranks in ranks_of.items() if value != common}


def same_row(
    check: str,
    values: Mapping[int, str],
    hosts: Sequence[str],
    todo: str,
    bad: Verdict = "FAIL",
) -> Row:
    """A value that must be everybody's."""
    odd = odd_ones(values)
    common = next((value for value in values.values() if value not in odd), "nothing to compare")
    if not odd:
        return Row(check, "ok", common)
    return Row(check, bad, f"{grouped(odd, hosts)}; all others: {common}", todo)
