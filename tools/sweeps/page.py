"""A sweep as a page, sweep.html: one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from harness.files.records import Unreadable
from harness.report.chart import STYLE
from harness.runfolder import RunFolder
from tools.look.palette import css
from tools.sweeps import plots
from tools.sweeps.cost import Record
from tools.sweeps.spec import Sweep
from tools.sweeps.text import best_command, best_of, ranked, short_names, shown

_STYLE = """
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 var(--font)}
main{max-width:1100px;margin:auto;padding:16px}
section{background:var(--surface);border:1px solid var(--grid);border-radius:8px;padding:14px;
margin:14px 0;overflow-x:auto}
h1{font-size:22px;margin:8px 0}h2{font-size:16px;margin:0 0 8px}p{margin:6px 0;color:var(--muted)}
code{font:13px/1.5 var(--mono);overflow-wrap:anywhere}
.slices{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(320px,100%),1fr));gap:12px}
.chart{border:0;padding:0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid var(--grid)}
th{color:var(--muted);font-weight:500}a{color:var(--series-1)}
.key{display:inline-block;width:18px;height:3px;vertical-align:middle;margin:0 4px 0 12px}
"""
_LEGEND = (
    '<p><span class="key" style="background:var(--series-2)"></span>best'
    '<span class="key" style="background:var(--series-1)"></span>complete runs'
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
    title = escape(sweep.folder.name)
    drawn = plots.Plots(sweep, records)
    slices = "".join(drawn.slices())
    parts = [
        _summary(sweep, records),
        _section("", drawn.curves(_curves(sweep, records))),
        _section("", drawn.parallel()),
        _section("", f'<div class="slices">{slices}</div>'),
        _section("Trials", _table(sweep, records)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}: sweep</title><style>{css()}{STYLE}{_STYLE}{plots.STYLE}</style></head>"
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
    head = f"<h2>{title}</h2>" if title else ""
    return f"<section>{head}{body}</section>" if body else ""


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


def _curves(sweep: Sweep, records: Sequence[Record]) -> dict[int, plots.Points]:
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
