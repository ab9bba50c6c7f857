"""The answer as one page: the winner, ways to divide, smaller layouts, parts of a step's time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence

from harness.estimate.held import GIB
from harness.estimate.step_time.job import DAY
from harness.estimate.step_time.step import TERMS
from harness.report.page import document
from harness.report.words import escaped
from tools.cluster.count import (
    SHOWN,
    SMALLER_SHOWN,
    Counted,
    Question,
    best_of_each_way,
    days,
    front,
    tokens_text,
)
from tools.cluster.job import commands, settings

_COLOURS = 8  # series of the palette
_LEAST = 0.01  # share of a step that is drawn


def page_of(
    args: argparse.Namespace, question: Question, counted: Sequence[Counted], others: Sequence[str]
) -> str:
    """Return the page of a job and its layouts, ranked. `others`: lines of what-ifs."""
    best = counted[0] if counted[0].answers else None
    ways = best_of_each_way(counted)[:SHOWN]
    fit = sum(bool(each.fits) for each in counted)
    title = f"{args.model} on {args.gpus} x {args.gpu}"
    about = (
        f"{args.seq_len:,} tokens a sample, {args.global_batch:,} samples a step, "
        f"{tokens_text(question.data_tokens)} tokens; {len(counted):,} layouts, {fit:,} fit"
    )
    kind, word = ("good", "fits") if best else ("bad", "nothing fits")
    parts = [
        f"<header><h1>{escaped(title)}</h1><span class='badge {kind}'>{word}</span>"
        f"<p>{escaped(about)}</p></header>"
    ]
    if best is not None:
        parts += [_tiles(question, best), _spent(ways), _table("Ways to divide", ways, best)]
        small = [each for each in front(counted) if each is not best][:SMALLER_SHOWN]
        parts += [_table("Slower and smaller", small, best)] if small else []
        parts.append(_ready(args, best))
    else:
        parts.append(_table("The nearest", ways, None))
    if others:
        lines = "\n".join(line.strip() for line in others if line.strip())
        parts.append(f"<section class=card><h2>What if</h2><pre>{escaped(lines)}</pre></section>")
    return document(title, "".join(parts), [], by="tools/plan_cluster.py")


def _tiles(question: Question, best: Counted) -> str:
    job, step = question.job(best), best.time
    tiles = [
        ("Quickest layout", best.layout.text, f"most: {TERMS[step.bound]}"),
        ("A step", f"{step.seconds:.2f} s", f"MFU {step.mfu:.1%}"),
        ("Speed", f"{step.tokens_per_s_per_gpu:,.0f}", "tokens/s of a GPU"),
        ("Memory", f"{best.peak_bytes / GIB:.1f} GiB", "of the fullest GPU, at least"),
        ("All of it", days(job.seconds), f"{job.gpu_hours:,.0f} GPU-hours"),
        ("With failures", days(job.days_with_failures * DAY), f"{job.energy_kwh:,.0f} kWh"),
    ]
    if question.price is not None:
        tiles.append(("Cost", f"{job.cost(question.price):,.0f}", f"{question.price:g} a GPU-hour"))
    items = "".join(
        f"<div><span>{escaped(name)}</span><b>{escaped(value)}</b><small>{escaped(more)}</small>"
        "</div>"
        for name, value, more in tiles
    )
    return f"<section class=tiles>{items}</section>"


def _spent(ways: Sequence[Counted]) -> str:
    """Return a stacked bar of seconds for each way."""
    most = max(each.seconds for each in ways)
    names = [name for name in TERMS if any(w.terms[name] >= _LEAST * w.seconds for w in ways)]
    colour = {
        name: f"var(--series-{n + 1})" if n < _COLOURS else "var(--faint)"
        for n, name in enumerate(sorted(names, key=lambda name: -ways[0].terms[name]))
    }
    legend = "".join(
        f"<li style='--c:{colour[name]}'>{escaped(TERMS[name])}</li>" for name in colour
    )
    rows = "".join(
        f"<tr><th>{escaped(each.layout.text)}</th><td class=bars><div class=bar>"
        + "".join(
            f"<i style='width:{each.terms[name] / most:.2%};background:{colour[name]}' "
            f"title='{escaped(TERMS[name])} {each.terms[name]:.3g} s'></i>"
            for name in colour
            if each.terms[name] > 0
        )
        + f"</div></td><td>{each.seconds:.2f} s</td></tr>"
        for each in ways
    )
    return (
        "<section class=card><h2>Seconds of a step, by the best of each way to divide</h2>"
        f"<ul class='legend blocks'>{legend}</ul><table class=rows>{rows}</table></section>"
    )


def _table(title: str, shown: Iterable[Counted], best: Counted | None) -> str:
    rows = "".join(
        f"<tr><td>{escaped(each.layout.text)}</td><td>{each.seconds:.2f}</td>"
        f"<td>{each.time.tokens_per_s_per_gpu:,.0f}</td><td>{each.time.mfu:.1%}</td>"
        f"<td>{each.peak_bytes / GIB:.1f}</td>"
        f"<td>{escaped(each.why_not(best) or 'the quickest')}</td></tr>"
        for each in shown
    )
    return (
        f"<section class=card><h2>{escaped(title)}</h2><div class=scroll><table><thead><tr>"
        "<th>layout</th><th>s a step</th><th>tokens/s a GPU</th><th>MFU</th><th>GiB</th>"
        f"<th>why it is not the best</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _ready(args: argparse.Namespace, best: Counted) -> str:
    run = "\n".join(f"{k} = {json.dumps(v)}" for k, v in settings(args, best.layout).items())
    lines = "\n".join(commands(args, best.layout, "ds.json", "run.toml"))
    return (
        "<section class=card><h2>Ready to run</h2>"
        f"<h3>ds.json</h3><pre>{escaped(json.dumps(best.layout.deepspeed, indent=2))}</pre>"
        f"<h3>run.toml</h3><pre>{escaped(run)}</pre>"
        f"<h3>job.sh</h3><pre>{escaped(lines)}</pre></section>"
    )
