"""Charts by layer and by position, and the table of the needle-in-a-haystack test."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness.report.chart import Chart, Curve, Heat, Mark, html_of
from harness.report.lines import number
from harness.report.run_record import RunRecord

_PREFIX = "needle/"


def needle_card(run: RunRecord) -> str:
    """Return a table of lengths and depths, coloured by probability; "" without needles."""
    line = next((line for line in reversed(run.lines) if _lengths(line)), {})
    lengths = _lengths(line)
    if not lengths:
        return ""
    found = [line[f"{_PREFIX}{length}"] for length in lengths]
    depths = range(max(map(len, found)))
    heat = Heat(
        "Needle in a haystack",
        "probability by length in tokens and depth",
        [f"{length:,}" for length in lengths],
        [f"{100 * depth / max(len(depths) - 1, 1):.0f} %" for depth in depths],
        [[number(row[depth]) if depth < len(row) else None for row in found] for depth in depths],
        "var(--good)",
        "var(--bad)",
        note="A sentence with a number is hidden at a depth of held-out text and asked for at the "
        f"end: geometric mean of the probability of the number's tokens at step {line['step']:,}.",
    )
    return f"<section id=needles>{html_of(heat)}</section>"


def _lengths(line: dict[str, Any]) -> list[int]:
    names = [key.removeprefix(_PREFIX) for key, value in line.items() if isinstance(value, list)]
    return sorted(int(name) for name in names if f"{_PREFIX}{name}" in line and name.isdecimal())


PROFILES = 4
"""Maximum number of probes in a chart by layer or position."""


def profiles(run: RunRecord) -> Iterator[Chart]:
    """Yield charts by layer and by position, of a few probes from the first to the last."""
    for prefix, title, unit, note in (
        (
            "attention_entropy/",
            "Attention entropy by layer",
            "nats, mean over heads",
            "0: a head looks at one token; high: at all alike. A fall to 0 precedes divergence.",
        ),
        ("attention_coverage/", "Attention coverage by layer", "share of the tokens", ""),
    ):
        names = {key.removeprefix(prefix) for line in run.lines for key in line if prefix in key}
        layers = sorted(int(name) for name in names if name.isdecimal())
        rows = [
            (line["step"], [(layer, number(line.get(f"{prefix}{layer}"))) for layer in layers])
            for line in run.lines
            if layers and f"{prefix}{layers[-1]}" in line
        ]
        yield _profile(prefix[:-1].replace("_", "-"), title, unit, "layer", rows, note)
    rows = [
        (line["step"], [(place, number(value)) for place, value in enumerate(values)])
        for line in run.lines
        if isinstance(values := line.get("loss_by_position"), list)
    ]
    trained = number(run.planned("run", "data", "seq_len"))
    longest = number(run.planned("run", "eval", "seq_len"))
    axis, marks, window = "part of the window", list[Mark](), longest or trained
    if window:  # the last token of each part
        axis = f"position in a window of {window:,.0f} tokens"
        rows = [
            (step, [(round((n + 1) * window / len(parts)), loss) for n, loss in parts])
            for step, parts in rows
        ]
    note = "It falls to the right if the model uses the preceding text."
    if run.planned("run", "train", "carry_state"):
        note = "It is flat if the carried state holds what the model needs."
    if rows and trained and longest:
        marks = [Mark({axis: trained}, "var(--warning)", "length of the training samples")]
        note += f" The line is where training samples end, at {trained:,.0f} tokens."
    chart = _profile(
        "loss-by-position", "Loss by position", "nats per token, held-out", axis, rows, note
    )
    yield replace(chart, marks=marks)


def _profile(
    name: str,
    title: str,
    unit: str,
    axis: str,
    rows: list[tuple[int, list[tuple[int, float | None]]]],
    note: str,
) -> Chart:
    """Return a chart with a curve for each of a few probes, the last one in full colour."""
    last = len(rows) - 1
    places = {last * n // (PROFILES - 1) for n in range(PROFILES)} if rows else set()
    shown = [rows[at] for at in sorted(places)]
    curves = []
    for place, (step, pairs) in enumerate(shown):
        xs = [float(x) for x, value in pairs if value is not None]
        share = 25 + 75 * (place + 1) // len(shown)
        colour = f"color-mix(in srgb,var(--series-1) {share}%,var(--grid))"
        values = [value for _, value in pairs if value is not None]
        curves.append(Curve(f"step {step:,}", colour, {axis: xs}, values))
    return Chart(name, title, unit, curves, note=note, axes={axis: axis}, whole_x=True)
