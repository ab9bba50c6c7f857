"""One run as a page: its status, what to do, curves, events, memory, time, samples, plan.

A training run starts `python -m harness.report.page RUN` (run/pages.py) as a separate process, so
that a bug or a full or slow disk costs it a page and nothing else.
"""

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from harness.layout.shape import Shape, num_parameters
from harness.report.chart import AXES, SCRIPT, STYLE, html_of, piece, strip
from harness.report.charts import charts, grouped
from harness.report.events import events_card, spent
from harness.report.formatting import count, cut, duration, escaped, gib, moment, short
from harness.report.lines import number
from harness.report.palette import COMPONENTS, css
from harness.report.profiles import needle_card
from harness.report.run_record import Event, RunRecord, dig, read, values_of
from harness.report.verdicts import (
    Advice,
    Verdict,
    advice,
    ending,
    memory_rows,
    progress,
    state,
    verdicts,
)

NAME = "report.html"
MOST_CHARACTERS = 200_000
"""Characters of plan.json that the page shows."""
MOST_OF_A_PROMPT = 300
"""Characters of a prompt that a sample shows before the answer."""
REFRESH_S = 60
"""Interval at which the page of a running run reloads itself."""

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page_of(run: RunRecord) -> str:
    """Return the page of one run."""
    body = "".join(
        (
            _header(run),
            _tiles(run),
            _judged(run),
            axis_switch(),
            f"<section class=charts>{''.join(map(html_of, charts([run])))}</section>",
            needle_card(run),
            _memory(run),
            _time(run),
            _samples(run),
            events_card(run),
            _plan(run),
        )
    )
    return document(run.name, body, refresh=run.outcome == "running" and not run.is_silent())


def document(
    title: str, body: str, refresh: bool = False, by: str = "tools/report.py", script: str = SCRIPT
) -> str:
    """Return a whole page: it needs no other file and no network, and its policy forbids both."""
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    again = f'<meta http-equiv=refresh content="{REFRESH_S}">' if refresh else ""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<meta http-equiv=Content-Security-Policy content="{policy}">{again}'
        f"<title>{escaped(title)}</title>"
        f"<style>{css()}{STYLE}{_STYLE}</style></head><body>"
        f"<main>{body}<footer>Written {moment(time.time())} by "
        f"<code>python {by}</code>: one file, no network.</footer></main>"
        f"<script>{script}</script></body></html>\n"
    )


def _header(run: RunRecord) -> str:
    end = ending(run)
    return (
        f"<header><h1>{escaped(run.name)}</h1>"
        f"<span class='badge {end.kind}'>{escaped(state(run))}</span>"
        f"<p>{escaped(described(run))}</p></header>"
    )


def described(run: RunRecord) -> str:
    """Return model, cluster and layout as one line."""
    parts = [f"{run.text('run', 'model', 'name') or 'unknown model'}"]
    if (size := parameters(run)) is not None:
        parts.append(f"{short(size)} parameters")
    world = number(run.planned("world", "world_size"))
    if world is not None:
        chip = run.text("world", "gpu") or f"{run.text('world', 'accelerator').upper()} rank"
        per_node = number(run.planned("world", "local_world_size")) or world
        nodes = f" on {count(world / per_node)} nodes" if 0 < per_node < world else ""
        plural = "s" if world > 1 and chip.endswith("rank") else ""
        shares = f"{count(world)} ranks on " if run.ranks_per_gpu > 1 else ""
        chips = -(-int(world) // run.ranks_per_gpu)
        parts.append(f"{shares}{count(chips)} x {chip}{plural}{nodes}")
    grid = run.planned("grid")
    axes = ("pipeline", "tensor", "sequence", "expert")
    split = [f"{axis} {n}" for axis in axes if (n := number(dig(grid, axis))) and n > 1]
    if (stage := number(run.planned("zero_stage"))) is not None:
        parts.append(", ".join([f"ZeRO {stage:.0f}", *split]))
    parts.append(run.text("precision"))
    return " \u00b7 ".join(part for part in parts if part)


def parameters(run: RunRecord) -> int | None:
    """Return the model's number of parameters; None if the planner does not know the model."""
    config = run.planned("model_config")
    try:
        return num_parameters(Shape.from_hf(config)) if isinstance(config, dict) else None
    except Exception:  # a record that anybody may have edited
        return None


def _tiles(run: RunRecord) -> str:
    best, tiles = run.best(), []
    if best is not None:
        last = run.evaluations()[-1][1]
        now = f"perplexity {short(math.exp(min(best[1], 700)))}"
        if pairs := [*values_of(run.lines, "eval_preference_accuracy")]:
            now = f"{pairs[-1][1]:.0%} of pairs right"
        at = f"best, at step {best[0]:,}; {last:.3f} now" if last > best[1] else now
        tiles.append(("Held-out loss", f"{best[1]:.3f}", at))
    elif run.before is not None:
        tiles.append(("Held-out loss", f"{run.before:.3f}", "before training; none since"))
    losses = [value for _, value in values_of(run.lines, "loss")]
    if losses:
        tiles.append(("Training loss", f"{losses[-1]:.3f}", f"from {losses[0]:.3f}"))
    last_line = run.lines[-1] if run.lines else {}
    tokens = f"{short(number(last_line.get('tokens')))} tokens" if last_line else ""
    tiles.append(("Steps", progress(run), tokens))
    if run.seconds:
        used = f"{short(run.gpu_hours)} GPU hours, " if run.gpu_hours is not None else ""
        tiles.append(("Time at work", duration(run.seconds[-1]), used + _attempts(run)))
    rates = [value for _, value in values_of(run.lines, "tokens_per_s")]
    if rates:
        mfu = [value for _, value in values_of(run.lines, "mfu")]
        seconds = [value for _, value in values_of(run.lines, "step_time_s")] or [0.0]
        used = f"MFU {median(mfu):.1%}" if mfu else f"{duration(median(seconds))} per step"
        tiles.append(("Throughput", f"{short(median(rates))} tokens/s", used))
    rows = {point: (predicted, measured) for point, predicted, measured in memory_rows(run)}
    if rows:
        point = next((name for name in ("peak", "between_steps") if name in rows), next(iter(rows)))
        predicted, measured = rows[point]
        when = "at most" if point == "peak" else point.replace("_", " ")
        tiles.append(("Tensors of a rank", gib(measured), f"{when}, predicted {gib(predicted)}"))
    items = "".join(
        f"<div><span>{escaped(name)}</span><b>{escaped(value)}</b><small>{escaped(more)}</small></div>"
        for name, value, more in tiles
    )
    return f"<section class=tiles>{items}</section>"


def _attempts(run: RunRecord) -> str:
    attempts = number(run.status.get("attempt")) or 1
    steps = run.metrics.repeated
    repeated = f", {count(steps)} step{'s' * (steps > 1)} repeated" if steps else ""
    return f"{attempts:.0f} attempt{'s' * (attempts > 1)}{repeated}"


def _judged(run: RunRecord) -> str:
    judged = [ending(run), *verdicts(run), *(Verdict("warning", text) for text in run.problems)]
    items = "".join(f"<li class={kind}>{escaped(text)}</li>" for kind, text in judged)
    return (
        "<section class=two><div class=card><h2>How it goes</h2>"
        f"<ul class=verdicts>{items}</ul></div>"
        f"<div class=card><h2>What to do next</h2>{_advice(advice(run))}</div></section>"
    )


def _advice(items: list[Advice]) -> str:
    if not items:
        return "<p>Nothing: it continues by itself.</p>"
    return "".join(
        f"<p>{escaped(text)}</p>{f'<pre>{escaped(line)}</pre>' if line else ''}"
        for text, line in items
    )


def axis_switch() -> str:
    """Return radio buttons that make CSS show one kind of x axis."""
    buttons = "".join(
        f'<label><input type=radio name=axis id="by-{axis}"{" checked" * (axis == "step")}>'
        f"{escaped(text)}</label>"
        for axis, text in AXES.items()
    )
    return f"<fieldset class=switch><legend>Curves over</legend>{buttons}</fieldset>"


def _memory(run: RunRecord) -> str:
    """Return memory measured and predicted, and the prediction for each phase of a step."""
    rows = memory_rows(run)
    most = max((max(pair[1:]) for pair in rows), default=0)
    bars = "".join(
        f"<tr><th>{escaped(point.replace('_', ' '))}</th><td class=bars>"
        f"<div class=bar>{piece(measured / most, 'var(--series-1)', 'measured')}</div>"
        f"<div class=bar>{piece(predicted / most, 'var(--faint)', 'predicted')}</div></td>"
        f"<td>{gib(measured)}<small>predicted {gib(predicted)}, "
        f"{predicted / max(measured, 1) - 1:+z.1%}</small></td></tr>"
        for point, predicted, measured in rows
        if most
    )
    measured_table = f"<table class=rows>{bars}</table>" if bars else ""
    phases = run.planned("estimate", "phases")
    stacks = _stacks(phases if isinstance(phases, dict) else {}, run)
    if not measured_table and not stacks:
        return ""
    compared = f"<div class=card><h2>Memory, measured and predicted</h2>{measured_table}</div>"
    return f"<section class=two>{compared if measured_table else ''}{stacks}</section>"


def _stacks(phases: dict[str, Any], run: RunRecord) -> str:
    """Return a stacked bar for each phase of a step."""
    sizes = {
        name: grouped({part: size for part, value in parts.items() if (size := number(value))})
        for name, parts in phases.items()
        if isinstance(parts, dict)
    }
    most = max((sum(parts.values()) for parts in sizes.values()), default=0.0)
    if not most:
        return ""
    rows = "".join(
        f"<tr><th>{escaped(name.replace('_', ' '))}</th><td class=bars><div class=bar>"
        + "".join(
            piece(size / most, f"var(--{group})", f"{group} {gib(size * 2**30)}")
            for group, size in parts.items()
            if size
        )
        + f"</div></td><td>{gib(sum(parts.values()) * 2**30)}</td></tr>"
        for name, parts in sizes.items()
    )
    groups = [group for group in COMPONENTS if any(parts[group] for parts in sizes.values())]
    legend = "".join(f'<li style="--c:var(--{group})">{group}</li>' for group in groups)
    device = number(run.planned("estimate", "device_gib"))
    room = f" of {device:.0f} GiB" if device else ""
    return (
        f"<div class=card><h2>Memory of a step, predicted</h2>"
        f"<p class=note>Fullest rank{room}, phase by phase.</p>"
        f"<ul class='legend blocks'>{legend}</ul><table class=rows>{rows}</table></div>"
    )


def _time(run: RunRecord) -> str:
    parts = spent(run)
    total = sum(part.seconds for part in parts)
    if not total:
        return ""
    drawn = strip(
        {part.name: part.seconds for part in parts},
        {part.name: part.colour for part in parts},
        {part.name: f"{part.seconds / total:.1%} {duration(part.seconds)}" for part in parts},
    )
    return f"<section class=card><h2>Where the time went</h2>{drawn}</section>"


def _samples(run: RunRecord) -> str:
    samples = run.of_kind("sample")
    if not samples:
        return ""
    shown = [samples[0], samples[-1]] if len(samples) > 1 else samples
    titles = [f"{event.get('title', 'sample')}, step {event.get('step')}" for event in shown]
    cards = "".join(
        f"<div class=card><h3>{escaped(title.capitalize())}</h3>{_sample(event)}</div>"
        for event, title in zip(shown, titles, strict=True)
    )
    return f"<h2>What it writes</h2><section class=two>{cards}</section>"


def _sample(event: Event) -> str:
    """Return a sample: of a long prompt its end, because the answer is what the model wrote."""
    prompt = str(event.get("prompt", ""))
    end = "\n".join(prompt[-MOST_OF_A_PROMPT:].rsplit("\n", 4)[-4:])
    whole = f"<details><summary>The whole prompt</summary><pre>{escaped(prompt)}</pre></details>"
    cut_off = len(end) < len(prompt)
    answer = event.get("text") or "(no text)"
    return (
        f"<pre class=sample><span>{'... ' * cut_off}{escaped(end)}</span>"
        f"{escaped(answer)}</pre>{whole * cut_off}"
    )


def _plan(run: RunRecord) -> str:
    if not run.plan:
        return ""
    rows = "".join(
        f"<tr><th>{escaped(name)}<td>{escaped(value)}</tr>"
        for name, value in plan_rows(run)
        if value
    )
    whole = cut(json.dumps(run.plan, indent=2), MOST_CHARACTERS)
    return (
        f"<section class=card><h2>Plan</h2><table class=plan>{rows}</table>"
        f"<details><summary>plan.json</summary><pre>{escaped(whole)}</pre></details></section>"
    )


def _length(run: RunRecord, rows: str) -> str:
    """Return examples, windows and steps of a run; "" if they were not recorded."""
    examples, windows = (
        number(run.planned("data", f"trained_{name}")) for name in ("examples", "windows")
    )
    if examples is None or windows is None:
        return ""
    packed = f" in {count(windows)} windows" if rows == "windows" else ""
    return f"{count(examples)} examples{packed} to train on, {count(run.total_steps)} steps"


def plan_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the settings that a reader looks for first, as (name, value)."""
    sizes = ("global_batch", "micro_batch", "grad_accum")
    batch, micro, accumulated = (number(run.planned(name)) for name in sizes)
    length, ranks = number(run.planned("run", "data", "seq_len")), run.planned("grid", "data")
    ratio = number(run.planned("run", "optim", "warmup_ratio"))
    warmup = f"{run.text('run', 'optim', 'warmup_steps')} steps"
    if ratio is not None:
        warmup = f"{ratio:.3g} of all steps"
    optim = {key: run.text("run", "optim", key) for key in ("name", "lr", "schedule")}
    is_packed = run.text("run", "data", "batching") in ("", "packed")
    rows = "windows" if is_packed else "examples"
    amounts = [(number(run.planned("data", unit)), unit) for unit in ("documents", "tokens")]
    versions = run.planned("versions")
    package_versions = versions if isinstance(versions, dict) else {}
    model = (run.text("model_source"), run.text("model_config", "model_type"))
    return [
        ("owner", run.text("owner")),
        ("model", ", ".join(filter(None, model))),
        ("parameters", count(size) if (size := parameters(run)) is not None else ""),
        ("DeepSpeed JSON", run.text("deepspeed_source")),
        (
            "batch",
            f"{count(batch)} {rows} per step = micro-batch {count(micro)} x {count(accumulated)} "
            f"accumulated x {count(number(ranks))} data ranks, {count(length)} tokens each",
        ),
        ("length", _length(run, rows)),
        (
            "optimizer",
            f"{optim['name']}, rate {optim['lr']} ({optim['schedule']}, {warmup} of warm-up)",
        ),
        ("data", ", ".join(f"{count(size)} {unit}" for size, unit in amounts if size is not None)),
        ("attention", run.text("run", "model", "attention")),
        ("seed", run.text("run", "train", "seed")),
        ("versions", ", ".join(f"{name} {version}" for name, version in package_versions.items())),
        ("commit", run.text("git_commit")),
        ("started in", run.text("started_in")),
    ]


def write_page(path: Path, page: str) -> None:
    """Replace a page atomically: a reader sees the old one or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def main(run: str) -> int:
    """Write runs/NAME/report.html."""
    folder = Path(run)
    try:
        write_page(folder / NAME, page_of(read(folder)))
    except OSError as error:
        print(f"{folder / NAME} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # a page can wait, a rank cannot
    sys.exit(main(sys.argv[1]))
