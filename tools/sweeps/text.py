"""A sweep as text: its trials, their ranking, the command of the best, lines on a terminal."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from harness import terminal
from harness.files.paths import script
from harness.report.run_record import read
from tools.sweeps.cost import Cost, Record
from tools.sweeps.slurm import JOB, sbatch_options
from tools.sweeps.space import Choice
from tools.sweeps.spec import Sweep

if TYPE_CHECKING:  # Optuna
    from tools.sweeps.running import Running

_ENDS = {"done": "", "pruned": "stopped early", "diverged": "diverged", "failed": "failed"}


def short_names(sweep: Sweep) -> dict[str, str]:
    """Return the last part of every key, or the whole key where two would be the same."""
    last = {key: key.rpartition(".")[2] for key in sweep.space}
    return {key: key if [*last.values()].count(name) > 1 else name for key, name in last.items()}


def values_text(sweep: Sweep, choice: Choice) -> str:
    """Return a trial's values on one line."""
    return " ".join(f"{name}={choice.get(key, '?')}" for key, name in short_names(sweep).items())


def listing(sweep: Sweep, costs: Sequence[Cost]) -> str:
    """Return trials and their cost, before any of them has run."""
    settings, budget = sweep.settings, sweep.settings.budget
    lines = []
    if settings.method != "tpe":
        rows = [
            [f"{n:03}", f"{cost.steps:,}", f"{cost.tokens:,}", *(choice or {}).values()]
            for n, (choice, cost) in enumerate(zip(sweep.choices(), costs, strict=True))
        ]
        lines.append(_table(["trial", "steps", "tokens", *short_names(sweep).values()], rows))
        each = [(cost.steps, cost.tokens) for cost in costs]
    else:
        lines.append(f"{settings.trials} trials; each is chosen when it starts (tpe)")
        worst = max(costs, key=lambda cost: cost.tokens)
        each = [(worst.steps, worst.tokens)] * sweep.number_of_trials
    steps, tokens = (sum(numbers) for numbers in zip(*each, strict=True))
    total = f"{len(each)} trials: {steps:,} steps, {tokens:,} tokens"
    lines.append(total + (" if none is stopped early" if settings.prune else ""))
    limits = {"steps": budget.steps, "tokens": budget.tokens, "hours": budget.hours}
    if any(limits.values()):
        words = (f"{limit:,} {name}" for name, limit in limits.items() if limit)
        lines.append(f"budget: {', '.join(words)}")
    if peaks := [cost.peak_gib for cost in costs if cost.peak_gib is not None]:
        lines.append(f"memory: at most {max(peaks):.2f} GiB in tensors per rank")
    lines.append(f"folder: {sweep.folder}")
    return "\n".join(lines)


def ranked(records: Sequence[Record]) -> list[Record]:
    """Return the trials that have a result: whole trials first, then by how they ended."""
    order = {"done": 0, "pruned": 1, "diverged": 2}
    compared = [record for record in records if record.state in order]
    return sorted(compared, key=lambda result: (order[result.state], result.value, result.number))


def best_of(records: Sequence[Record]) -> Record | None:
    """Return the best of the trials that ran to their end; None if none did."""
    return next((record for record in ranked(records) if record.state == "done"), None)


def cells_of(sweep: Sweep, record: Record, place: object, end: str) -> list[str]:
    """Return a trial's row of `heads`."""
    values = (record.choice.get(key, "") for key in sweep.space)
    name, steps = f"{record.number:03}", f"{record.used.steps:,}"
    return [str(place), name, shown(record.value), steps, *values, end]


def heads(sweep: Sweep) -> list[str]:
    """Return the names of the columns."""
    return ["rank", "trial", sweep.settings.metric, "steps", *short_names(sweep).values(), ""]


def ranking(sweep: Sweep, records: Sequence[Record]) -> str:
    """Return the ranked table, failures with their reasons, and the name of the best."""
    rows = [
        cells_of(sweep, record, place, _ENDS[record.state])
        for place, record in enumerate(ranked(records), 1)
    ]
    blocks = [_table(heads(sweep), rows)] if rows else []
    for record in records:
        if record.state == "failed":
            blocks.append(f"trial {record.number:03} failed: {record.reason}")
    used = sum(record.used.steps for record in records)
    hours = sum(record.used.hours for record in records)
    ended = sum(record.has_ended for record in records)
    blocks.append(f"{ended} of {len(records)} trials, {used:,} steps, {hours:.2f} hours")
    runs = (read(sweep.folder_of(r.number)) for r in records if r.state == "done")
    if (sets := len({run.held_out_set for run in runs})) > 1:
        blocks.append(
            f"{sets} held-out sets, whose losses cannot be compared: keep data.*, eval.* and "
            "train.carry_state out of [search], or compare only trials with equal values of them"
        )
    if (best := best_of(records)) is not None:
        where = sweep.folder_of(best.number)
        blocks.append(f"best: {where}, {sweep.settings.metric} {shown(best.value)}, as by")
    return "\n".join(blocks)


def best_command(sweep: Sweep, best: Record) -> str:
    """Return the command that trains with a trial's values: on Slurm if the sweep ran there."""
    ranks = sweep.settings.ranks
    start = ["python"] if ranks == 1 else ["deepspeed", "--num_accelerators", str(ranks)]
    program = script("harness/train.py")
    if (sweep.folder / JOB).exists():
        start, program = ["sbatch", *sbatch_options(sweep)], script("slurm/train.sbatch")
    return f"{shlex.join(start)} {program} {shlex.join(sweep.command(best.choice).words())}"


def ending(sweep: Sweep, record: Record) -> str:
    """Return a line about a trial that has ended."""
    how = f"{sweep.settings.metric} {shown(record.value)}"
    if record.state in ("running", "waiting"):
        how = f"interrupted at step {record.used.steps}; it resumes with the sweep"
    elif record.state != "done":
        how = f"{record.state}: {record.reason}" + ("" if record.value == math.inf else f", {how}")
    return f"trial {record.number:03} | {values_text(sweep, record.choice)} | {how}"


def shown(value: float) -> str:
    """Return a metric as text."""
    return f"{value:.4f}" if math.isfinite(value) else "-"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [names, *rows]
    ]
    return "\n".join(lines)


class Screen:
    """Standard output, whose last line is updated in place on a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._line = ""

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._replace("")
        terminal.say(text)

    def show(self, running: Iterable[Running]) -> None:
        """Replace the line that changes: each trial's step and metric."""
        texts = (
            f"{result.trial.number:03} step {result.step}/{result.cost.steps} {shown(result.value)}"
            for result in running
        )
        self._replace(" | ".join(texts))

    def _replace(self, line: str) -> None:
        if not self._is_terminal or line == self._line:
            return
        width = (terminal.columns(sys.stdout) or terminal.COLUMNS) - 1
        print(f"\r{line[:width]:<{min(width, len(self._line))}}", end="", flush=True)
        if not line:
            print("\r", end="", flush=True)
        self._line = line
