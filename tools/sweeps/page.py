"""A sweep as a page, sweep.html: one file that needs no network."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from harness.report.chart import Curve, Mark, Scale, html_of, legend_of, lines
from harness.report.page import document, write_page
from harness.report.run_record import read, values_of
from tools.sweeps.cost import Record
from tools.sweeps.space import Dimension, Values
from tools.sweeps.spec import Sweep
from tools.sweeps.text import (
    best_command,
    best_of,
    cells_of,
    heads,
    ranked,
    short_names,
    shown,
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
_STATES = {"done": "", "pruned": "stopped early"}


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
    best = best_of(records)
    text = (
        f"<h1>Sweep {escape(sweep.folder.name)}</h1><p>{escape(sweep.settings.method)} over "
        f"{escape(', '.join(sweep.space))}: {ended} of {len(records)} trials have ended, after "
        f"{steps:,} steps.</p>"
    )
    if best is not None:
        text += (
            f"<p>Best: trial {best.number:03}, {escape(sweep.settings.metric)} "
            f"{shown(best.value)}</p><code>{escape(best_command(sweep, best))}</code>"
        )
    legend = [(words, _COLOURS[state][0], "", "") for state, words in _LEGEND.items()]
    return f"<section>{text}{legend_of(legend, 'lines')}</section>"


def _table(sweep: Sweep, records: Sequence[Record]) -> str:
    rows = ["".join(f"<th>{escape(name)}</th>" for name in heads(sweep))]
    failed = [record for record in records if record.state == "failed"]
    for place, record in enumerate([*ranked(records), *failed], 1):
        end = _STATES.get(record.state, f"{record.state}: {record.reason}"[:200])
        rank, folder = "" if record.state == "failed" else place, sweep.folder_of(record.number)
        cells = [escape(cell) for cell in cells_of(sweep, record, rank, end)]
        if (folder / "report.html").exists():
            cells[1] = f'<a href="{folder.name}/report.html">{cells[1]}</a>'
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<table class=runs>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


# --- plots ---


class Plots:
    """The plots of the trials' results so far."""

    def __init__(self, sweep: Sweep, records: Sequence[Record]) -> None:
        self._sweep, self._metric = sweep, sweep.settings.metric
        # The best is last, so that it is drawn above the others.
        self._records = [
            record for record in reversed(ranked(records)) if math.isfinite(record.value)
        ]
        self._best = best_of(records)

    def curves(self) -> str:
        """Return the metric of every trial over its steps; stopped ones end early."""
        drawn = []
        for record in self._records:
            lines_of_run = read(self._sweep.folder_of(record.number)).lines
            if evaluations := [*values_of(lines_of_run, self._metric)]:
                drawn.append(self._curve(record, evaluations))
        return html_of(
            lines(f"{self._metric} over steps", drawn, "step", has_legend=False, height=300)
        )

    def slices(self) -> Iterator[str]:
        """Yield a plot of the metric against every searched key."""
        for key, name in short_names(self._sweep).items():
            scale = _scale(self._sweep.space[key])
            drawn = [
                self._curve(
                    record, [(_number(scale, record.choice[key]), record.value)], is_dot=True
                )
                for record in self._records
            ]
            axis = {"log_x": scale.log, "x_range": (scale.low, scale.high)}
            if scale.words:
                axis = {"x_words": scale.words}
            title = f"{self._metric} against {key}"
            yield html_of(lines(title, drawn, name, has_legend=False, **axis))

    def parallel(self) -> str:
        """Return parallel coordinates: a line for each trial, through its values to its metric."""
        if not self._records:
            return ""
        names = short_names(self._sweep)
        axes = {key: _scale(self._sweep.space[key]) for key in names}
        values = [record.value for record in self._records]
        low, high = min(values), max(values)
        room = (high - low or abs(high) or 1.0) * 0.06
        metric = Scale(low - room, high + room)
        drawn, words = list[Curve](), (*names.values(), self._metric)
        for place, scale in enumerate([*axes.values(), metric]):
            ticks, texts = zip(*scale.ticks(), strict=True)
            xs = {"x": [float(place)] * len(ticks)}
            sides = [(text, "left") for text in texts]
            drawn.append(Curve("", "var(--faint)", xs, [*ticks], "dots", width=4, names=sides))
        for record in self._records:
            shares = [at.share(_number(at, record.choice[key])) for key, at in axes.items()]
            shares.append(metric.share(record.value))
            drawn.append(self._curve(record, [*enumerate(shares)]))
        marks = [Mark({"x": float(at)}, "var(--faint)", name) for at, name in enumerate(words)]
        chart = lines(
            "Every trial's values and where they led", drawn, marks=marks, x_words=words,
            y_range=(0, 1), has_legend=False, height=320,
        )  # fmt: skip
        return f"<section class=parallel>{html_of(chart)}</section>"

    def _curve(
        self, record: Record, points: Sequence[tuple[float, float]], is_dot: bool = False
    ) -> Curve:
        """Return a line or a dot that stands for a trial."""
        is_best = self._best is not None and record.number == self._best.number
        colour, width = _COLOURS["best" if is_best else record.state]
        title = (
            f"trial {record.number:03}: {values_text(self._sweep, record.choice)}, "
            f"{self._metric} {shown(record.value)}, {record.used.steps} steps"
        )
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
