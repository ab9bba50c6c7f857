"""The needles of a run's last evaluation as a heat map."""

from __future__ import annotations

from typing import Any

from harness.report.lines import number
from harness.report.recorded import Recorded

_PREFIX = "needle/"


def needle_card(run: Recorded) -> str:
    """Return a table of lengths and depths, coloured by probability; "" without needles."""
    line = next((line for line in reversed(run.lines) if _lengths(line)), {})
    lengths = _lengths(line)
    if not lengths:
        return ""
    rows = [line[f"{_PREFIX}{length}"] for length in lengths]
    depths = max(map(len, rows))
    head = "".join(f"<th>{length:,}</th>" for length in lengths)
    body = "".join(
        f"<tr><th>{100 * depth / max(depths - 1, 1):.0f} %</th>"
        f"{''.join(_cell(row[depth : depth + 1]) for row in rows)}</tr>"
        for depth in range(depths)
    )
    return (
        "<section class=card id=needles><h2>Needle in a haystack</h2>"
        "<p class=note>A sentence with a number, hidden at a depth of held-out text and asked for "
        "at the end: probability of each of the number's tokens, geometric mean, at step "
        f"{line['step']:,}. Columns are lengths in tokens, rows are depths.</p>"
        f"<table class=heat><tr><th></th>{head}</tr>{body}</table></section>"
    )


def _lengths(line: dict[str, Any]) -> list[int]:
    names = [key.removeprefix(_PREFIX) for key, value in line.items() if isinstance(value, list)]
    return sorted(int(name) for name in names if f"{_PREFIX}{name}" in line and name.isdecimal())


def _cell(values: list[Any]) -> str:
    value = number(values[0]) if values else None
    if value is None:
        return "<td></td>"
    share = round(100 * min(max(value, 0.0), 1.0))
    colour = f"color-mix(in srgb,var(--good) {share}%,var(--bad))"
    return f'<td style="background:{colour}">{value:.2f}</td>'
