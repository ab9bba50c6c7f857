"""The table: one row per check, the ranks it names, one verdict."""

import statistics
import textwrap
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from harness.errors import ExitCode
from harness.guard.watchdog import ranges

Verdict = Literal["ok", "warn", "FAIL"]
K = TypeVar("K", bound=Hashable)

SLOW = 0.7
"""A rank, link or node below this fraction of the median is named. A throttled GPU or a link at
half its width falls below it; healthy hardware differs by a few percent."""
_NAMED = 4  # nodes named before the rest is counted
_CHECK_WIDTH, _VERDICT_WIDTH, _TEXT_WIDTH = 20, 9, 90


@dataclass(frozen=True)
class Row:
    """One check."""

    check: str
    verdict: Verdict
    found: str  # the values, from lowest to highest, and the ranks that stand out
    todo: str = ""  # advice; empty if the check passed


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return the rows and the verdict as text. `width`: of the terminal."""
    text_width = _TEXT_WIDTH
    if width is not None:
        text_width = max(20, min(_TEXT_WIDTH, width - _CHECK_WIDTH - _VERDICT_WIDTH))
    lines = [f"{'check':<{_CHECK_WIDTH}}{'verdict':<{_VERDICT_WIDTH}}found, and what to do"]
    for row in rows:
        texts = [row.found, *([f"-> {row.todo}"] if row.todo else [])]
        wrapped = [line for text in texts for line in textwrap.wrap(text, text_width)]
        lines.append(f"{row.check:<{_CHECK_WIDTH}}{row.verdict:<{_VERDICT_WIDTH}}{wrapped[0]}")
        lines += [" " * (_CHECK_WIDTH + _VERDICT_WIDTH) + line for line in wrapped[1:]]
    return "\n".join([*lines, "", f"preflight: {_conclusion(rows)}"])


def _conclusion(rows: Sequence[Row]) -> str:
    checks = {v: [row.check for row in rows if row.verdict == v] for v in ("warn", "FAIL")}
    warnings = f"{count(len(checks['warn']), 'warning')} ({', '.join(checks['warn'])})"
    if checks["FAIL"]:
        also = f"; {warnings}" if checks["warn"] else ""
        return f"FAIL, do not start: {', '.join(checks['FAIL'])}{also}"
    return f"ok to start, {warnings if checks['warn'] else 'no warnings'}"


def code(rows: Sequence[Row]) -> ExitCode:
    """Return BAD_CONFIG, which is never requeued, if a check failed."""
    return ExitCode.BAD_CONFIG if any(r.verdict == "FAIL" for r in rows) else ExitCode.DONE


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table for programs."""
    verdict = "FAIL" if code(rows) else "ok"
    return {"verdict": verdict, "code": int(code(rows)), "checks": [asdict(row) for row in rows]}


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def span(values: Iterable[float], unit: str, form: str = ".1f") -> str:
    """Return a range as text: "61.2 to 63.0 GiB"; a single number if both ends round to it."""
    texts = [format(value, form) for value in sorted(values)]
    return f"{' to '.join(dict.fromkeys((texts[0], texts[-1])))} {unit}"


def slow(values: Mapping[K, float]) -> list[K]:
    """Return the keys below SLOW times the median; of two values, the faster one is the median."""
    limit = SLOW * statistics.median_high(values.values()) if values else 0.0
    return [key for key, value in values.items() if value < limit]


def who(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Return ranks by node: "n2 (rank 9), n3 (ranks 16-23)"."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    return _first(
        [
            f"{host} ({'rank' if len(here) == 1 else 'ranks'} {ranges(here)})"
            for host, here in by_host.items()
        ],
        "more node", ", ",
    )  # fmt: skip


def by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks of each text."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def grouped(ranks_of: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """Return the first few texts with their ranks, and a count of the others."""
    texts = [f"{who(ranks, hosts)}: {text}" for text, ranks in ranks_of.items()]
    return _first(texts, "other text", "; ")


def _first(texts: Sequence[str], noun: str, separator: str) -> str:
    more = len(texts) - _NAMED
    return separator.join([*texts[:_NAMED], *([f"and {count(more, noun)}"] if more > 0 else [])])


# --- rows ---


def same_row(
    check: str, values: Mapping[int, str], hosts: Sequence[str], todo: str, bad: Verdict = "FAIL"
) -> Row:
    """Return the row of a value that all ranks must share: the most common one counts as right."""
    odd = by_text(sorted(values.items()))
    common = max(odd, key=lambda value: len(odd[value]), default="nothing to compare")
    odd.pop(common, None)
    if not odd:
        return Row(check, "ok", common)
    return Row(check, bad, f"{grouped(odd, hosts)}; all others: {common}", todo)


def named_row(
    check: str, text: str, says: str, ranks: Collection[int], hosts: Sequence[str], todo: str,
    bad: Verdict = "warn",
) -> Row:  # fmt: skip
    """Return the row of a limit: `text` and, if `ranks` break the limit, `says` and those ranks."""
    if not ranks:
        return Row(check, "ok", text)
    return Row(check, bad, f"{text}; {says} {who(ranks, hosts)}", todo)


def problem_row(
    check: str, fine: str, problems: Iterable[tuple[int, str]], hosts: Sequence[str], todo: str,
    bad: Verdict = "warn",
) -> Row:  # fmt: skip
    """Return the row of what ranks report: `fine` if all their texts are empty."""
    ranks_of = by_text((rank, text) for rank, text in problems if text)
    if not ranks_of:
        return Row(check, "ok", fine)
    return Row(check, bad, grouped(ranks_of, hosts), todo)
