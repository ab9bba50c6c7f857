"""Settings of a sweep, ranked: trials that differ in their seed alone are repetitions of one.

The ranking is also a table for papers: ranking.csv, and ranking.tex for the package booktabs.
"""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.report.page import write_page
from tools.sweeps.cost import Record
from tools.sweeps.space import Choice
from tools.sweeps.spec import SEED, Sweep

_ORDER = {"done": 0, "pruned": 1, "diverged": 2}
_ENDS = {"done": "", "pruned": "stopped early", "diverged": "diverged", "failed": "failed"}
_TEX = {"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


@dataclass(frozen=True)
class Setting:
    """The values of one trial, or of several that differ in their seed alone."""

    trials: tuple[Record, ...]
    """In the order of the seeds."""

    @property
    def first(self) -> Record:
        """The trial with the first seed, which decides whether the setting is stopped early."""
        return self.trials[0]

    @property
    def choice(self) -> Choice:
        """Its values, without the seed."""
        return {key: value for key, value in self.first.choice.items() if key != SEED}

    @property
    def values(self) -> list[float]:
        """Metrics of the trials that ran to their end."""
        return [trial.value for trial in self.trials if trial.state == "done"]

    @property
    def state(self) -> str:
        """The state of the trial that says most about it."""
        states = [trial.state for trial in self.trials]
        if self.first.state == "pruned":
            return "pruned"
        return next((s for s in ("diverged", "done") if s in states), self.first.state)

    @property
    def mean(self) -> float:
        """Mean of `values`; of a setting that was stopped early, its first trial's last value."""
        if self.state == "done":
            return statistics.fmean(self.values)
        return self.first.value if self.state == "pruned" else math.inf

    @property
    def deviation(self) -> float:
        """Standard deviation of `values` over the seeds (n - 1); infinite for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.inf

    @property
    def name(self) -> str:
        """Numbers of its trials."""
        ends = [f"{trial.number:03}" for trial in (self.first, self.trials[-1])]
        return "-".join(dict.fromkeys(ends))

    @property
    def end(self) -> str:
        """How it ended; "" if all its trials have a result."""
        if len(self.trials) > 1 and self.state in ("done", "diverged"):
            states = [trial.state for trial in self.trials]
            return ", ".join(
                f"{states.count(state)} {state}"
                for state in dict.fromkeys(states)
                if state != "done"
            )
        return _ENDS.get(self.state, self.state)


def settings_of(sweep: Sweep, records: Sequence[Record]) -> list[Setting]:
    """Return the settings of trials, in the order of their numbers."""
    of: dict[int, list[Record]] = {}
    for record in records:
        of.setdefault(record.number // len(sweep.seeds), []).append(record)
    return [Setting(tuple(trials)) for trials in of.values()]


def ranked(sweep: Sweep, records: Sequence[Record]) -> list[Setting]:
    """Return the settings that have a result, by their mean: whole ones first, then by how they
    ended.
    """

    def place(setting: Setting) -> tuple[int, int, float, int]:
        missing = len(setting.trials) - len(setting.values) if setting.state == "done" else 0
        return _ORDER[setting.state], missing, setting.mean, setting.first.number

    compared = (s for s in settings_of(sweep, records) if s.state in _ORDER)
    return sorted(compared, key=place)


def best_of(sweep: Sweep, records: Sequence[Record]) -> Setting | None:
    """Return the best of the settings that ran to their end; None if none did."""
    return next((s for s in ranked(sweep, records) if s.state == "done"), None)


def tied(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings after the first that other seeds may rank before it: those whose mean
    difference over the seeds that both have is within twice its standard error.
    """
    best, *others = settings
    return [other for other in others if _is_tied(best, other)]


def _is_tied(best: Setting, other: Setting) -> bool:
    both = zip(best.trials, other.trials, strict=False)  # by seed; the last may not have begun
    apart = [b.value - a.value for a, b in both if a.state == b.state == "done"]
    within = 2 * statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else -math.inf
    return statistics.fmean(apart or [0.0]) <= within


def write_tables(sweep: Sweep, records: Sequence[Record]) -> list[Path]:
    """Write ranking.csv and ranking.tex; return their paths."""
    settings, metric = ranked(sweep, records), sweep.settings.metric
    ties, table = tied(settings) if settings else [], io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    of_seeds = [f"{metric}, {SEED}={seed}" for seed in sweep.seeds if seed]
    heads = ["rank", "trials", *sweep.space, metric, "standard deviation", "n", *of_seeds, "note"]
    writer.writerow(heads)
    for place, setting in enumerate(settings, 1):
        values = [setting.choice.get(key, "") for key in sweep.space]
        each = [_exact(trial.value) for trial in setting.trials] if of_seeds else []
        numbers = [_exact(setting.mean), _exact(setting.deviation), len(setting.values)]
        note = setting.end or ["", "tied with rank 1"][setting in ties]
        writer.writerow([place, setting.name, *values, *numbers, *each, note])
    paths = [sweep.folder / "ranking.csv", sweep.folder / "ranking.tex"]
    for path, text in zip(paths, (table.getvalue(), _latex(sweep, settings, ties)), strict=True):
        write_page(path, text)
    return paths


def _latex(sweep: Sweep, settings: Sequence[Setting], ties: Sequence[Setting]) -> str:
    """Return a table of the settings that ran to their end; its numbers need no packages."""
    rows = []
    for setting in settings:
        if setting.state == "done":
            spread = rf" \pm {setting.deviation:.4f}" if setting.deviation < math.inf else ""
            values = [_tex(setting.choice.get(key, "")) for key in sweep.space]
            mark = r"^\dagger" if setting in ties else ""
            rows.append([*values, f"${setting.mean:.4f}{spread}{mark}$", str(len(setting.values))])
    heads = [*map(_tex, sweep.space), _tex(sweep.settings.metric), "$n$"]
    lines = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([
        r"% \usepackage{booktabs}",
        r"% mean \pm standard deviation over n seeds (n - 1); \dagger: tied with the first",
        rf"\begin{{tabular}}{{{'l' * len(sweep.space)}rr}}",
        r"\toprule", " & ".join(heads) + r" \\", r"\midrule",
        *lines, r"\bottomrule", r"\end{tabular}", "",
    ])  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _exact(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""
