"""Plots of a sweep: curves, parallel coordinates, slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from harness.report.chart import Curve, Mark, Scale, html_of, lines
from tools.sweeps.cost import Record
from tools.sweeps.space import Dimension, Values
from tools.sweeps.spec import Sweep
from tools.sweeps.text import best_of, ranked, short_names, shown, values_text

Points = Sequence[tuple[float, float]]
"""Steps and the metric after them."""
STYLE = """
.parallel{min-width:600px}.parallel .y,.parallel .grid{display:none}
.parallel .plot{grid-template-columns:minmax(0,1fr);font-size:.85rem}
.parallel .x{border:0;color:var(--ink)}
.name{text-shadow:0 0 3px var(--surface),0 0 3px var(--surface)}
.parallel path{stroke-opacity:.85}.area path:hover{stroke:var(--ink)!important}
"""
_COLOURS = {
    "best": ("var(--series-2)", 3),
    "pruned": ("color-mix(in srgb,var(--muted) 45%,transparent)", 1.2),
}
_DONE = ("var(--series-1)", 1.6)


class Plots:
    """The plots of what the trials came to so far."""

    def __init__(self, sweep: Sweep, records: Sequence[Record]) -> None:
        self._sweep, self._metric = sweep, sweep.settings.metric
        # The best last: above the others.
        self._records = [of for of in reversed(ranked(records)) if math.isfinite(of.value)]
        self._best = best_of(records)

    def curves(self, curves: Mapping[int, Points]) -> str:
        """Return the metric of every trial over its steps; stopped ones end early."""
        drawn = [
            self._curve(of, curves[of.number]) for of in self._records if curves.get(of.number)
        ]
        return html_of(
            lines(f"{self._metric} over steps", drawn, "step", has_legend=False, height=300)
        )

    def slices(self) -> Iterator[str]:
        """Yield a plot of the metric against every key that is searched."""
        for key, name in short_names(self._sweep).items():
            scale = _scale(self._sweep.space[key])
            drawn = [
                self._curve(of, [(_number(scale, of.choice[key]), of.value)], is_dot=True)
                for of in self._records
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
        return f'<div class="parallel">{html_of(chart)}</div>'

    def _curve(self, record: Record, points: Points, is_dot: bool = False) -> Curve:
        """Return a line or a dot that stands for a trial."""
        is_best = self._best is not None and record.number == self._best.number
        colour, width = _COLOURS.get("best" if is_best else record.state, _DONE)
        title = (
            f"trial {record.number:03}: {values_text(self._sweep, record.choice)}, "
            f"{self._metric} {shown(record.value)}, {record.used.steps} steps"
        )
        xs, ys = [float(x) for x, _ in points], [y for _, y in points]
        width = 6 + 2 * width if is_dot else width
        return Curve("", colour, {"x": xs}, ys, width=width, title=title)


def _scale(dimension: Dimension) -> Scale:
    """Return the axis of a key that is searched."""
    if isinstance(dimension, Values):
        return Scale(-0.5, len(dimension.values) - 0.5, words=dimension.values)
    return Scale(dimension.from_, dimension.to, dimension.log)


def _number(scale: Scale, value: str) -> float:
    return float(scale.words.index(value)) if scale.words else float(value)
