"""A sweep as a page, sweep.html: one file that needs no network."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from harness.report.chart import Curve, Mark, Scale, html_of, legend_of, lines
from harness.report.page import document, write_page
from harness.report.repeats import band_of
from harness.report.run_record import read, values_of
from tools.sweeps.cost import Record
from tools.sweeps.ranking import Setting, best_of, ranked, settings_of
from tools.sweeps.space import Dimension, Values
from tools.sweeps.spec import Sweep
from tools.sweeps.text import (
    best_command,
    cells_of,
    heads,
    result_of,
    short_names,
    shown,
    tie_of,
    values_text,
)

_STYLE = """
.parallel{overflow-x:auto}.parallel>*{min-width:600px}.parallel .y,.parallel .grid{display:none}
.parallel .plot{grid-template-columns:minmax(0,1fr);font-size:.85rem}
.parallel .x{border:0;color:var(--ink)}.parallel path{stroke-opacity:.85}
.name{text-shadow:0 0 3px var(--surface),0 0 3px var(--surface)}
.area path:hover{stroke:var(--ink)!important}
"""
_COLOURS = {
    "best": ("var(--series-2)", 3),
    "done": ("var(--series-1)", 1.6),
    "pruned": ("color-mix(in srgb,var(--muted) 45%,transparent)", 1.2),
}
_LEGEND = {
    "best": "best",
    "done": "complete runs",
    "pruned": "stopped early: where they were last evaluated",
}


def write_sweep_page(sweep: Sweep, records: Sequence[Record]) -> Path:
    """Write sweep.html, the page of the trials' results so far."""
    drawn = Plots(sweep, records)
    body = (
        f"<style>{_STYLE}</style>{_summary(sweep, records)}"
        f"<section>{drawn.curves()}</section>{drawn.parallel()}"
        f"<section class=charts>{''.join(drawn.slices())}</section>"
        f"<h2>Trials</h2><section class='card capped'>{_table(sweep, records)}</section>"
    )
    path = sweep.folder / "sweep.html"
    # Without the report's script: trials are too many to list under the pointer.
    title = f"{sweep.folder.name}: sweep"
    write_page(path, document(title, body, by="tools/sweep.py", script=""))
    return path


def _summary(sweep: Sweep, records: Sequence[Record]) -> str:
    ended = sum(record.has_ended for record in records)
    steps = sum(record.used.steps for record in records)
    best = best_of(sweep, records)
    text = (
        f"<h1>Sweep {escape(sweep.folder.name)}</h1><p>{escape(sweep.settings.method)} over "
        f"{escape(', '.join(sweep.space))}: {ended} of {len(records)} trials have ended, after "
        f"{steps:,} steps.</p>"
    )
    if best is not None:
        text += (
            f"<p>Best: {escape(result_of(sweep, best))}</p>"
            f"<code>{escape(best_command(sweep, best))}</code>"
        )
        if tie := tie_of(ranked(sweep, records)):
            text += f"<p>{escape(tie.capitalize())}.</p>"
    legend = [(words, _COLOURS[state][0], "", "") for state, words in _LEGEND.items()]
    return f"<section>{text}{legend_of(legend, 'lines')}</section>"


def _table(sweep: Sweep, records: Sequence[Record]) -> str:
    rows = ["".join(f"<th>{escape(name)}</th>" for name in heads(sweep))]
    failed = [s for s in settings_of(sweep, records) if s.state == "failed"]
    for place, setting in enumerate([*ranked(sweep, records), *failed], 1):
        rank = "" if setting.state == "failed" else place
        cells = [escape(cell) for cell in cells_of(sweep, setting, rank, _end(setting))]
        folders = {f"{t.number:03}": sweep.folder_of(t.number) for t in setting.trials}
        links = (
            f'<a href="{folder.name}/report.html">{number}</a>'
            for number, folder in folders.items()
            if (folder / "report.html").exists()
        )
        cells[1] = " ".join(links) or cells[1]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<table class=runs>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _end(setting: Setting) -> str:
    """Return how a setting ended, with the first reason; "" if all its trials have a result."""
    reason = next((trial.reason for trial in setting.trials if trial.reason), "")
    return setting.end + f": {reason}"[:200] * bool(setting.end and reason)


# --- plots ---


class Plots:
    """The plots of the results so far: a trial's, or the mean and the spread over the seeds."""

    def __init__(self, sweep: Sweep, records: Sequence[Record]) -> None:
        self._sweep, self._metric = sweep, sweep.settings.metric
        # The best is last, so that it is drawn above the others.
        self._settings = [s for s in reversed(ranked(sweep, records)) if math.isfinite(s.mean)]
        self._best = best_of(sweep, records)

    def curves(self) -> str:
        """Return the metric of every setting over its steps; stopped ones end early."""
        drawn = list[Curve]()
        for setting in self._settings:
            folders = [self._sweep.folder_of(trial.number) for trial in setting.trials]
            curves = [[*values_of(read(folder).lines, self._metric)] for folder in folders]
            if any(curves):
                colour, width, title = self._look(setting)
                drawn += band_of(curves, "", colour, width=width, title=title)
        return html_of(
            lines(f"{self._metric} over steps", drawn, "step", has_legend=False, height=300)
        )

    def slices(self) -> Iterator[str]:
        """Yield a plot of the metric against every searched key."""
        for key, name in short_names(self._sweep).items():
            scale = _scale(self._sweep.space[key])
            drawn = [
                self._curve(s, [(_number(scale, s.choice[key]), s.mean)], is_dot=True)
                for s in self._settings
            ]
            axis = {"log_x": scale.log, "x_range": (scale.low, scale.high)}
            if scale.words:
                axis = {"x_words": scale.words}
            title = f"{self._metric} against {key}"
            yield html_of(lines(title, drawn, name, has_legend=False, **axis))

    def parallel(self) -> str:
        """Return parallel coordinates: a line for each setting, through values to metric."""
        if not self._settings:
            return ""
        names = short_names(self._sweep)
        axes = {key: _scale(self._sweep.space[key]) for key in names}
        values = [setting.mean for setting in self._settings]
        low, high = min(values), max(values)
        room = (high - low or abs(high) or 1.0) * 0.06
        metric = Scale(low - room, high + room)
        drawn, words = list[Curve](), (*names.values(), self._metric)
        for place, scale in enumerate([*axes.values(), metric]):
            ticks, texts = zip(*scale.ticks(), strict=True)
            xs = {"x": [float(place)] * len(ticks)}
            sides = [(text, "left") for text in texts]
            drawn.append(Curve("", "var(--faint)", xs, [*ticks], "dots", width=4, names=sides))
        for setting in self._settings:
            shares = [at.share(_number(at, setting.choice[key])) for key, at in axes.items()]
            shares.append(metric.share(setting.mean))
            drawn.append(self._curve(setting, [*enumerate(shares)]))
        marks = [Mark({"x": float(at)}, "var(--faint)", name) for at, name in enumerate(words)]
        chart = lines(
            "All values and where they led", drawn, marks=marks, x_words=words,
            y_range=(0, 1), has_legend=False, height=320,
        )  # fmt: skip
        return f"<section class=parallel>{html_of(chart)}</section>"

    def _look(self, setting: Setting) -> tuple[str, float, str]:
        """Return the colour and width of what stands for a setting, and the text at the pointer."""
        is_best = self._best is not None and setting.first.number == self._best.first.number
        steps = sum(trial.used.steps for trial in setting.trials)
        title = (
            f"trial {setting.name}: {values_text(self._sweep, setting.choice)}, "
            f"{self._metric} {shown(setting.mean)}, {steps} steps"
        )
        return (*_COLOURS["best" if is_best else setting.state], title)

    def _curve(
        self, setting: Setting, points: Sequence[tuple[float, float]], is_dot: bool = False
    ) -> Curve:
        """Return a line or a dot that stands for a setting."""
        colour, width, title = self._look(setting)
        xs, ys = [float(x) for x, _ in points], [y for _, y in points]
        width = 6 + 2 * width if is_dot else width
        return Curve("", colour, {"x": xs}, ys, width=width, title=title)


def _scale(dimension: Dimension) -> Scale:
    """Return the axis of a searched key."""
    if isinstance(dimension, Values):
        return Scale(-0.5, len(dimension.values) - 0.5, words=dimension.values)
    return Scale(dimension.from_, dimension.to, dimension.log)


def _number(scale: Scale, value: str) -> float:
    return float(scale.words.index(value)) if scale.words else float(value)
