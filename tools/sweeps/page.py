"""A sweep as a page, sweep.html: one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from harness.files.records import Unreadable
from harness.runfolder import RunFolder
from tools.look.palette import css
from tools.sweeps.cost import Record
from tools.sweeps.plots import Curve, Plots
from tools.sweeps.spec import Sweep
from tools.sweeps.text import best_command, best_of, ranked, short_names, shown

_STYLE = """
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 var(--font)}
main{max-width:1100px;margin:auto;padding:16px}
section{background:var(--surface);border:1px solid var(--grid);border-radius:8px;padding:14px;
margin:14px 0;overflow-x:auto}
h1{font-size:22px;margin:8px 0}h2{font-size:16px;margin:0 0 8px}p{margin:6px 0;color:var(--muted)}
code{font:13px/1.5 var(--mono);overflow-wrap:anywhere}
svg{display:block;font:12px var(--font);fill:var(--muted)}
svg.wide{width:100%;min-width:600px}svg.small{width:330px;max-width:100%}
.tick{paint-order:stroke;stroke:var(--surface);stroke-width:3px;stroke-linejoin:round}
.slices{display:flex;flex-wrap:wrap;gap:12px}
.grid{stroke:var(--grid)}.axis{stroke:var(--faint)}.name{fill:var(--ink)}
circle{fill:var(--series-1);stroke:var(--surface);stroke-width:1.5}
circle.pruned{fill:var(--surface);stroke:var(--muted);stroke-opacity:.6}
polyline{fill:none;stroke:var(--series-1);stroke-width:1.6;stroke-opacity:.75}
polyline.pruned{stroke:var(--muted);stroke-width:1.2;stroke-opacity:.45}
circle.best{fill:var(--series-2);stroke:var(--ink)}
polyline.best{stroke:var(--series-2);stroke-width:3;stroke-opacity:1}
polyline:hover{stroke:var(--ink);stroke-width:3;stroke-opacity:1}circle:hover{stroke:var(--ink)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid var(--grid)}
th{color:var(--muted);font-weight:500}a{color:var(--series-1)}
.key{display:inline-block;width:18px;height:3px;vertical-align:middle;margin:0 4px 0 12px}
"""
_LEGEND = (
    '<p><span class="key" style="background:var(--series-2)"></span>best'
    '<span class="key" style="background:var(--series-1)"></span>whole runs'
    '<span class="key" style="background:var(--muted);opacity:.45"></span>'
    "stopped early: where they were last evaluated</p>"
)
_STATES = {"done": "", "pruned": "stopped early"}


def write_page(sweep: Sweep, records: Sequence[Record]) -> Path:
    """Write sweep.html; a reader sees the old one or the new one, whole."""
    path = sweep.folder / "sweep.html"
    temporary = path.with_name(".sweep.html")
    temporary.write_text(page(sweep, records), encoding="utf-8")
    temporary.replace(path)
    return path


def page(sweep: Sweep, records: Sequence[Record]) -> str:
    """Return the page of what the trials came to so far."""
    title, metric = escape(sweep.folder.name), escape(sweep.settings.metric)
    plots = Plots(sweep, records)
    slices = "".join(plots.slices())
    parts = [
        _summary(sweep, records),
        _section(f"{metric} over steps", plots.curves(_curves(sweep, records))),
        _section("Every trial's values and where they led", plots.parallel()),
        _section(f"{metric} against each key", f'<div class="slices">{slices}</div>'),
        _section("Trials", _table(sweep, records)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}: sweep</title><style>{css()}{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


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
    return text + _LEGEND


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _table(sweep: Sweep, records: Sequence[Record]) -> str:
    names = ["rank", "trial", sweep.settings.metric, "steps", *short_names(sweep).values(), ""]
    rows = ["".join(f"<th>{escape(name)}</th>" for name in names)]
    failed = [record for record in records if record.state == "failed"]
    for place, record in enumerate([*ranked(records), *failed], 1):
        name = f"{record.number:03}"
        if (sweep.folder_of(record.number) / "report.html").exists():
            name = f'<a href="{sweep.folder_of(record.number).name}/report.html">{name}</a>'
        end = _STATES.get(record.state, f"{record.state}: {record.reason}"[:200])
        cells = [
            *(str(place) if record.state != "failed" else "", name, shown(record.value)),
            *(f"{record.used.steps:,}", *(escape(record.choice.get(k, "")) for k in sweep.space)),
            escape(end),
        ]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _curves(sweep: Sweep, records: Sequence[Record]) -> dict[int, Curve]:
    """Return the evaluations of every trial."""
    curves = {}
    for record in records:
        try:
            lines = RunFolder(sweep.folder_of(record.number)).read_metrics()
        except (OSError, Unreadable):
            continue
        points = [(line["step"], line.get(sweep.settings.metric)) for line in lines]
        curves[record.number] = [(x, float(y)) for x, y in points if isinstance(y, int | float)]
    return curves
