"""Steps of an acceptance, their checks and results, and a table of 80 columns."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from harness.errors import ExitCode

Verdict = Literal["held", "failed", "skipped"]

WIDTH = 80
_STEP, _VERDICT, _SECONDS = 15, 8, 6
_INDENT = " " * 4
_MOST = 400  # characters of a text; the log has the rest


@dataclass(frozen=True)
class Step:
    """One step."""

    name: str
    question: str
    where: str
    """ "MODULE:FUNCTION"; the function takes a Bench and returns the step's main figure."""


@dataclass(frozen=True)
class Check:
    """One check of a step."""

    name: str
    verdict: Verdict
    text: str = ""  # what was measured; why it failed, or was skipped


@dataclass(frozen=True)
class Result:
    """The result of a step."""

    step: str
    seconds: float
    figure: str = ""  # the main figure
    problem: str = ""  # why the step itself did not finish
    checks: tuple[Check, ...] = ()
    cpu_s: float = 0.0  # processor seconds of all its processes
    log: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # measurements, for programs

    @property
    def verdict(self) -> Verdict:
        """Failed if any check failed, skipped if all were skipped."""
        verdicts = {check.verdict for check in self.checks}
        if self.problem or "failed" in verdicts or not verdicts:
            return "failed"
        return "held" if "held" in verdicts else "skipped"


def read_result(path: Path, step: str, seconds: float, cpu_s: float, log: Path) -> Result:
    """Return the result that a step's process wrote, or one with a `problem` if it is invalid."""
    values: dict[str, Any] = {"step": step, "seconds": seconds, "cpu_s": cpu_s, "log": str(log)}
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return TypeAdapter(Result).validate_python({**written, **values})
    except (OSError, ValueError, TypeError):
        return Result(**values, problem="it ended without a result")


def table(results: Sequence[Result]) -> str:
    """Return a line for each step, and below it what failed or was skipped."""
    lines = [f"{'step':{_STEP}}{'verdict':{_VERDICT}}{'s':>{_SECONDS}}  figure"]
    lines.append("-" * WIDTH)
    for result in results:
        lines += _lines(result)
    return "\n".join([*lines, "-" * WIDTH, conclusion(results)])


def _lines(result: Result) -> list[str]:
    start = f"{result.step:{_STEP}}{result.verdict:{_VERDICT}}{result.seconds:{_SECONDS}.0f}  "
    figure = textwrap.wrap(readable(result.figure), WIDTH - len(start)) or [""]
    lines = [(start + figure[0]).rstrip(), *(" " * len(start) + more for more in figure[1:])]
    if result.problem:
        lines += _wrapped(f"FAILED: {result.problem}")
    for check in result.checks:
        if check.verdict == "failed":
            lines += _wrapped(f"FAILED: {check.name}: {check.text}")
    if result.verdict == "failed" and result.log:
        lines += _wrapped(f"see {result.log}")
    skipped: dict[str, list[str]] = {}
    for check in result.checks:
        if check.verdict == "skipped":
            skipped.setdefault(check.text, []).append(check.name)
    for why, names in skipped.items():
        lines += _wrapped(f"{why}: {', '.join(names)}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        readable(text), WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "  "
    )


def readable(text: str) -> str:
    """Return a process's text on one line, without control characters, and shortened if long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MOST else f"{line[: _MOST // 2]} ... {line[-_MOST // 2 :]}"


def conclusion(results: Sequence[Result]) -> str:
    """Return the verdict over all steps: a sentence, in lines of WIDTH."""
    steps = {v: [r.step for r in results if r.verdict == v] for v in ("held", "failed", "skipped")}
    seconds, cpu_s = (sum(getattr(r, name) for r in results) for name in ("seconds", "cpu_s"))
    time = f"{seconds:.0f} s, {cpu_s:.0f} s of processors"
    parts = [f"{len(steps['held'])} of {len(results)} steps held in {time}"]
    parts += [f"skipped: {', '.join(steps['skipped'])}"] if steps["skipped"] else []
    parts += [f"FAILED: {', '.join(steps['failed'])}"] if steps["failed"] else []
    return textwrap.fill("; ".join(parts), WIDTH)


def code(results: Sequence[Result]) -> int:
    """Return DONE, or 1 if a step failed."""
    return 1 if any(result.verdict == "failed" for result in results) else int(ExitCode.DONE)


def as_json(results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    """Return the results for programs."""
    steps = [{"verdict": result.verdict, **asdict(result)} for result in results]
    return {**about, "code": code(results), "steps": steps}
