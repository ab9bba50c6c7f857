"""Several runs as a page: which is best, what differs, overlaid curves."""

import json

from harness.config.assignments import flat
from harness.report.chart import colour_of, html_of
from harness.report.charts import charts
from harness.report.formatting import duration, escaped, short
from harness.report.page import axis_switch, described, document
from harness.report.repeats import seeds_section
from harness.report.run_record import RunRecord, values_of
from harness.report.verdicts import ending, progress, state

MOST_DRAWN = 24
"""Runs whose curves are drawn: the best ones."""
MOST_DIFFERENCES = 60

# Parts of plan.json that were asked for; the rest follows from them or changes with every start.
_ASKED = ("run", "deepspeed_given", "deepspeed_source", "world", "precision", "model_config")
_SEEDS = ("train.seed", "deepspeed_given.seed")
_MOST_NAMED = 3  # keys
_OF_THE_DAY = ("run.run.", "world.rank", "world.local_rank")


def ranked(runs: list[RunRecord]) -> list[RunRecord]:
    """Return runs by their lowest held-out loss, best first, grouped by held-out set."""
    return [run for of_set in by_set(runs) for run in of_set]


def by_set(runs: list[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs of each held-out set, best first; losses on two sets cannot be compared."""
    sets: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=_lowest):
        sets.setdefault(run.held_out_set, []).append(run)
    return [*sets.values()]


def _lowest(run: RunRecord) -> float:
    best = run.best()
    return float("inf") if best is None else best[1]


def compare_page_of(runs: list[RunRecord], title: str, price: float | None = None) -> str:
    """Return the page of several runs; `price` is that of a GPU hour."""
    sets, runs = by_set(runs), ranked(runs)
    drawn = charts(runs[:MOST_DRAWN])
    body = (
        f"<header><h1>{escaped(title)}</h1>{_best(sets)}</header>{_table(sets, price)}"
        f"{seeds_section(named(over_seeds(runs)))}"
        f"{axis_switch()}<section class=charts>{''.join(map(html_of, drawn))}</section>"
        f"{_differences(runs)}"
    )
    return document(title, body)


def _best(sets: list[list[RunRecord]]) -> str:
    count, names = sum(map(len, sets)), [""]
    if len(sets) > 1:
        names = [f" of set {letter(n)}" for n in range(len(sets))]
    texts = [
        f"<b>{escaped(of_set[0].name)}</b> has the lowest held-out loss{set_name}, {best[1]:.4f} "
        f"at step {best[0]:,}{_unimproved(of_set[0])}"
        for set_name, of_set in zip(names, sets, strict=True)
        if (best := of_set[0].best()) is not None
    ]
    if not texts:
        return f"<p>{count} runs, none of them evaluated</p>"
    apart = ""
    if len(sets) > 1:
        apart = f" on {len(sets)} held-out sets, whose losses cannot be compared"
    return f"<p>{count} runs{apart}; {'; '.join(texts)}</p>"


def _unimproved(run: RunRecord) -> str:
    return "" if run.has_improved() else f", did not improve ({run.before:.4f} before training)"


def letter(number: int) -> str:
    """Return the name of a held-out set."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def _table(sets: list[list[RunRecord]], price: float | None) -> str:
    rows, place = [], 0
    for number, of_set in enumerate(sets):
        name = letter(number) if len(sets) > 1 else ""
        for run in of_set:
            # A run that is alone in its set is the best of nothing.
            is_best = run is of_set[0] and (len(of_set) > 1 or len(sets) == 1)
            rows.append(_row(place, run, name, is_best and run.best() is not None, price))
            place += 1
    heads = f"run|owner|state{'|set' * (len(sets) > 1)}|held-out|at step|training|steps|tokens"
    heads += f"|tokens/s|time|GPU hours{'|cost' * (price is not None)}|model"
    head = "".join(f"<th>{name}" for name in heads.split("|"))
    return (
        "<section class='card capped'><table class=runs>"
        f"<tr><th>{head}</tr>{''.join(rows)}</table></section>"
    )


def _row(place: int, run: RunRecord, of_set: str, is_best: bool, price: float | None) -> str:
    best, losses = run.best(), [value for _, value in values_of(run.lines, "loss")]
    rates = sorted(value for _, value in values_of(run.lines, "tokens_per_s"))
    name = escaped(run.name)
    swatch = ""
    if place < MOST_DRAWN:
        swatch = (
            f'<label><input type=checkbox checked data-run="{place}" aria-label="show {name}">'
            f'<i class=swatch style="--c:{colour_of(place)}"></i></label>'
        )
    if best:
        held_out = (f"{best[1]:.4f}", f"{best[0]:,}{_unimproved(run)}")
    else:
        held_out = ("-", "-") if run.before is None else (f"{run.before:.4f}", "0, before training")
    cells = (
        (of_set,) if of_set else (),
        held_out,
        (f"{losses[-1]:.4f}" if losses else "-", progress(run)),
        (short(run.tokens_at(run.lines[-1])) if run.lines else "-",),
        (short(rates[len(rates) // 2]) if rates else "-",),
        (duration(run.seconds[-1]) if run.seconds else "-",),
        used(run, price),
        (described(run),),
    )
    best_class = " class=best" if is_best else ""
    star = f" \u2605 best{f' of {of_set}' if of_set else ''}" if is_best else ""
    return (
        f"<tr{best_class}><td>{swatch}<td>{name}{star}"
        f"<td>{escaped(run.text('owner') or '-')}<td class={ending(run).kind}>{escaped(state(run))}"
        + "".join(f"<td>{escaped(cell)}" for group in cells for cell in group)
        + "</tr>"
    )


def used(run: RunRecord, price: float | None) -> tuple[str, ...]:
    """Return a run's GPU hours, followed by their cost if the price of one is known."""
    hours = run.gpu_hours
    if hours is None:
        return ("-",) if price is None else ("-", "-")
    return (f"{hours:,.2f}",) if price is None else (f"{hours:,.2f}", f"{hours * price:,.2f}")


def over_seeds(runs: list[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs in groups, each of which differ in their seed alone."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        asked = {
            key: value
            for key, value in _asked(run).items()
            if key != "run.train.seed" and not key.startswith(_OF_THE_DAY)
        }
        groups.setdefault(json.dumps([run.held_out_set, asked]), []).append(run)
    return [*groups.values()]


def named(groups: list[list[RunRecord]]) -> list[tuple[str, list[RunRecord]]]:
    """Return each group with a name: its values of the first keys in which the groups differ."""
    rows = differences([group[0] for group in groups])
    told = [(key.rpartition(".")[2], row) for key, row in rows if key not in _SEEDS][:_MOST_NAMED]
    told = [("" if key == "name" else f"{key} ", row) for key, row in told]
    return [
        (", ".join(f"{key}{row[place]}" for key, row in told) or group[0].name, group)
        for place, group in enumerate(groups)
    ]


def _differences(runs: list[RunRecord]) -> str:
    rows = differences(runs)
    if not rows:
        text = "Their plans do not differ."
        return f"<section class=card><h2>What differs</h2><p>{text}</p></section>"
    head = "".join(
        f'<th><i class=swatch style="--c:{colour_of(place)}"></i>{escaped(run.name)}'
        for place, run in enumerate(runs)
    )
    body = "".join(
        f"<tr><th>{escaped(key)}{''.join(f'<td>{escaped(value)}' for value in values)}</tr>"
        for key, values in rows[:MOST_DIFFERENCES]
    )
    more = f"<p class=note>and {len(rows) - MOST_DIFFERENCES} more</p>" * (
        len(rows) > MOST_DIFFERENCES
    )
    return (
        "<section class=card><h2>What differs</h2><div class=capped><table class=runs>"
        f"<tr><th>{head}</tr>{body}</table></div>{more}</section>"
    )


def differences(runs: list[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return keys of the plans whose values differ, each with the value of every run."""
    asked = [_asked(run) for run in runs]
    keys = {key: None for values in asked for key in values if not key.startswith(_OF_THE_DAY)}
    rows = [(key, [values.get(key, "-") for values in asked]) for key in keys]
    return [(key.removeprefix("run."), row) for key, row in rows if len(set(row)) > 1]


def _asked(run: RunRecord) -> dict[str, str]:
    leaves = flat({part: run.planned(part) for part in _ASKED})
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in leaves if v is not None}
    return {key: text if len(text) <= 60 else f"{text[:57]}..." for key, text in texts.items()}
