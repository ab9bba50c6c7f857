"""A sweep as text: its trials, their ranking, the command of the best, lines on a terminal."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from harness import terminal
from harness.config.assignments import listed
from harness.files.paths import script
from harness.report.run_record import read
from tools.sweeps.cost import Cost, Record
from tools.sweeps.ranking import Setting, best_of, ranked, tied
from tools.sweeps.slurm import JOB, sbatch_options
from tools.sweeps.space import Choice
from tools.sweeps.spec import SEED, Sweep

if TYPE_CHECKING:  # Optuna
    from tools.sweeps.running import Running


def short_names(sweep: Sweep) -> dict[str, str]:
    """Return the last part of every key, or the whole key where two would be the same."""
    last = {key: key.rpartition(".")[2] for key in sweep.space}
    return {key: key if [*last.values()].count(name) > 1 else name for key, name in last.items()}


def values_text(sweep: Sweep, choice: Choice) -> str:
    """Return the values of a trial, or of a setting, on one line."""
    names = short_names(sweep) | ({SEED: "seed"} if SEED in choice else {})
    return " ".join(f"{name}={choice.get(key, '?')}" for key, name in names.items())


def listing(sweep: Sweep, costs: Sequence[Cost]) -> str:
    """Return trials and their cost, before any of them has run."""
    settings, budget = sweep.settings, sweep.settings.budget
    lines = []
    if settings.method != "tpe":
        rows = [
            [f"{n:03}", f"{cost.steps:,}", f"{cost.tokens:,}", *(choice or {}).values()]
            for n, (choice, cost) in enumerate(zip(sweep.choices(), costs, strict=True))
        ]
        names = [*short_names(sweep).values(), *["seed"] * is_repeated(sweep)]
        lines.append(_table(["trial", "steps", "tokens", *names], rows))
        each = [(cost.steps, cost.tokens) for cost in costs]
    else:
        lines.append(f"{settings.trials} settings; each is chosen when it starts (tpe)")
        worst = max(costs, key=lambda cost: cost.tokens)
        each = [(worst.steps, worst.tokens)] * sweep.number_of_trials
    steps, tokens = (sum(numbers) for numbers in zip(*each, strict=True))
    total = f"{len(each)} trials"
    if is_repeated(sweep):
        total = f"{sweep.number_of_settings} settings x {len(sweep.seeds)} seeds = {total}"
    total += f": {steps:,} steps, {tokens:,} tokens"
    lines.append(total + (" if none is stopped early" if settings.prune else ""))
    limits = {"steps": budget.steps, "tokens": budget.tokens, "hours": budget.hours}
    if any(limits.values()):
        words = (f"{limit:,} {name}" for name, limit in limits.items() if limit)
        lines.append(f"budget: {', '.join(words)}")
    if peaks := [cost.peak_gib for cost in costs if cost.peak_gib is not None]:
        lines.append(f"memory: at most {max(peaks):.2f} GiB in tensors per rank")
    lines.append(f"folder: {sweep.folder}")
    return "\n".join(lines)


def cells_of(sweep: Sweep, setting: Setting, place: object, end: str) -> list[str]:
    """Return a setting's row of `heads`."""
    values = (setting.choice.get(key, "") for key in sweep.space)
    steps = sum(trial.used.steps for trial in setting.trials)
    over = [shown(setting.deviation), str(len(setting.values))] * is_repeated(sweep)
    return [str(place), setting.name, shown(setting.mean), *over, f"{steps:,}", *values, end]


def heads(sweep: Sweep) -> list[str]:
    """Return the names of the columns; with several seeds, the metric is their mean."""
    of = ["trials", sweep.settings.metric, "std", "n"]
    if not is_repeated(sweep):
        of = ["trial", sweep.settings.metric]
    return ["rank", *of, "steps", *short_names(sweep).values(), ""]


def is_repeated(sweep: Sweep) -> bool:
    """Return True if settings are trained with several seeds."""
    return len(sweep.seeds) > 1


def ranking(sweep: Sweep, records: Sequence[Record]) -> str:
    """Return the ranked table, ties, failures with their reasons, and the name of the best."""
    settings = ranked(sweep, records)
    rows = [cells_of(sweep, s, place, s.end) for place, s in enumerate(settings, 1)]
    blocks = [_table(heads(sweep), rows)] if rows else []
    blocks += [tie_of(settings)] * bool(tie_of(settings))
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
    if (best := best_of(sweep, records)) is not None:
        blocks.append(f"best: {result_of(sweep, best)}, as by")
    return "\n".join(blocks)


def result_of(sweep: Sweep, setting: Setting) -> str:
    """Return where a setting was trained, and its metric."""
    metric = f"{sweep.settings.metric} {shown(setting.mean)}"
    if setting.deviation < math.inf:
        metric += f" (mean of {len(setting.values)} seeds, standard deviation "
        metric += f"{shown(setting.deviation)})"
    folders = [str(sweep.folder_of(trial.number)) for trial in setting.trials]
    return f"{' to '.join(dict.fromkeys([folders[0], folders[-1]]))}, {metric}"


def tie_of(settings: Sequence[Setting]) -> str:
    """Return which settings other seeds may rank before the first; "" if none."""
    ties = tied(settings) if settings else []
    if not ties:
        return ""
    places = listed(str(settings.index(other) + 1) for other in ties)
    return (
        "tied with rank 1, its difference over the same seeds within twice the standard error: "
        f"rank {places}. More seeds would tell them apart"
    )


def best_command(sweep: Sweep, best: Setting) -> str:
    """Return the command that trains with a setting's values: on Slurm if the sweep ran there."""
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
