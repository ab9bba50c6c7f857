"""Plots of a sweep: curves, parallel coordinates, slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from harness.report.chart import Chart, Curve, Scale, html_of, lines
from tools.sweeps.cost import Record
from tools.sweeps.space import Dimension, Values
from tools.sweeps.spec import Sweep
from tools.sweeps.text import best_of, ranked, short_names, shown, values_text

Points = Sequence[tuple[int, float]]
"""Steps and the metric after them."""
_COLOURS = {
    "best": ("var(--series-2)", 3),
    "pruned": ("color-mix(in srgb,var(--muted) 45%,transparent)", 1.2),
}
_DONE = ("var(--series-1)", 1.6)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 340, 70, 30, 14, 42


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
            self._curve(record, [(float(x), y) for x, y in curves[record.number]])
            for record in self._records
            if curves.get(record.number)
        ]
        return html_of(self._chart(f"{self._metric} over steps", drawn, "step", height=300))

    def slices(self) -> Iterator[str]:
        """Yield a plot of the metric against every key that is searched."""
        for key, name in short_names(self._sweep).items():
            scale = _scale(self._sweep.space[key])
            drawn = [
                self._curve(of, [(_number(scale, of.choice[key]), of.value)], is_dot=True)
                for of in self._records
            ]
            yield html_of(
                self._chart(
                    f"{self._metric} against {key}",
                    drawn,
                    name,
                    x_words=scale.words,
                    log_x=scale.log,
                    x_range=None if scale.words else (scale.low, scale.high),
                )
            )

    def parallel(self) -> str:
        """Return parallel coordinates: a line for each trial, through its values to its metric."""
        if not self._records:
            return ""
        names = short_names(self._sweep)
        axes = [(name, _scale(self._sweep.space[key])) for key, name in names.items()]
        values = [record.value for record in self._records]
        low, high = min(values), max(values)
        room = (high - low or abs(high) or 1.0) * 0.06
        axes.append((self._metric, Scale(low - room, high + room)))
        xs = [_LEFT + at * (_WIDTH - _LEFT - _RIGHT) / (len(axes) - 1) for at in range(len(axes))]
        marks, labels = list[str](), list[str]()
        for x, (name, scale) in zip(xs, axes, strict=True):
            marks.append(f'<path class="axis" d="M{x:.1f} {_y(0):.1f}V{_y(1):.1f}"/>')
            ticks = ((_y(share) + 4, text) for share, text in scale.ticks())
            labels += [_text(x - 6, y, text, "end") for y, text in ticks]
            labels.append(_text(x, _HEIGHT - 14, name, kind="name"))
        for record in self._records:
            heights = [
                *(scale.share(_number(scale, record.choice[key])) for key, (_, scale) in
                  zip(names, axes, strict=False)),
                axes[-1][1].share(record.value),
            ]  # fmt: skip
            points = " ".join(f"{x:.1f},{_y(at):.1f}" for x, at in zip(xs, heights, strict=True))
            colour, width = self._look(record)
            title = f"<title>{escape(self._title(record))}</title>"
            marks.append(
                f'<polyline points="{points}" style="stroke:{colour};stroke-width:{width}">'
                f"{title}</polyline>"
            )
        return (
            f'<svg class="wide" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label='
            f'"the values of every trial, and its metric">{"".join([*marks, *labels])}</svg>'
        )

    def _chart(self, title: str, curves: Sequence[Curve], x: str, **more: object) -> Chart:
        return lines(title, curves, x, has_legend=False, **more)

    def _curve(
        self, record: Record, points: Sequence[tuple[float, float]], is_dot: bool = False
    ) -> Curve:
        """Return a line or a dot that stands for a trial."""
        colour, width = self._look(record)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        width = 6 + 2 * width if is_dot else width
        return Curve("", colour, {"x": xs}, ys, width=width, title=self._title(record))

    def _look(self, record: Record) -> tuple[str, float]:
        is_best = self._best is not None and record.number == self._best.number
        return _COLOURS.get("best" if is_best else record.state, _DONE)

    def _title(self, record: Record) -> str:
        return (
            f"trial {record.number:03}: {values_text(self._sweep, record.choice)}, "
            f"{self._metric} {shown(record.value)}, {record.used.steps} steps"
        )


def _scale(dimension: Dimension) -> Scale:
    """Return the axis of a key that is searched."""
    if isinstance(dimension, Values):
        return Scale(-0.5, len(dimension.values) - 0.5, words=dimension.values)
    return Scale(dimension.from_, dimension.to, dimension.log)


def _number(scale: Scale, value: str | float) -> float:
    return float(scale.words.index(str(value))) if scale.words else float(value)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, label: str, anchor: str = "middle", kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(label)}</text>'
