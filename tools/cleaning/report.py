"""The report of a cleaning, from datatrove's statistics: as values, as text, and as one page."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report.chart import Chart, Curve, html_of
from harness.report.formatting import escaped, short
from harness.report.page import document as html_page
from tools.cleaning.pipeline import Pipeline, logs_of
from tools.cleaning.strictness import STRICTNESS, Document, Report, from_json, report_at

Values = Mapping[str, Any]
_TITLES = {"characters": "size", "quality": "quality", "diversity": "diversity"}
EXAMPLES = 20
_MOST_SHOWN = 400
_NAMES = {  # part of datatrove's step name -> our name
    "url": "url",
    "language": "language",
    "Gopher Repetition": "gopher_repetition",
    "C4 Quality": "c4",
    "Gopher Quality": "gopher_quality",
    "FineWeb Quality": "fineweb_quality",
    "bad words": "bad_words",
    "N-grams decontaminate": "decontaminate",
    "exact-deduplication stage 3": "exact_duplicates",
    "MinHash stage 4": "near_duplicates",
    "personal data": "personal_data",
}


Stats = Counter[str]  # datatrove's statistics of a step, with its seconds


def report_of(pipeline: Pipeline, logs: Path) -> dict[str, Any]:
    """Return the report as plain values. Raises OSError."""
    stages = [
        _stats(logs_of(logs, number, stage) / "stats")
        for number, stage in enumerate(pipeline.stages(), 1)
    ]
    (_, reader), (_, writer) = stages[0][0], stages[-1][-1]
    # The exact filter runs twice, before the signatures and at the end: use the later counts.
    by_name = {
        next((ours for part, ours in _NAMES.items() if part in name), name): stats
        for stage in (stages[0], stages[-1])
        for name, stats in stage
    }
    sample = _sample(pipeline)
    counts = {"read": reader["documents"], "empty": reader["empty"], "written": writer["total"]}
    return {
        "corpus": str(pipeline.corpus.path),
        "output": str(pipeline.data),
        "recipe": pipeline.recipe.model_dump(exclude_none=True),
        "documents": counts,
        "characters": {"read": reader["doc_len"], "written": writer["doc_len"]},
        "steps": [_step(name, by_name[name], pipeline) for name in pipeline.recipe.steps],
        "sample": {"documents": len(sample), "one_in": pipeline.sample_one_in},
        "after_steps": [*_after_steps(pipeline, sample)],
        "strictness": [
            {"strictness": at, **left.numbers(), "rejected": dict(left.rejected)}
            for at, left in ((at, report_at(sample.values(), at)) for at in STRICTNESS)
        ],
        "cpu_seconds": {
            name: round(stats["seconds"], 3)
            for stage in stages
            for name, stats in stage
            if stats["seconds"]
        },
    }


def _stats(folder: Path) -> list[tuple[str, Stats]]:
    """Return the name and statistics of each step of a stage, summed over its tasks."""
    added: list[tuple[str, Stats]] = []
    for file in sorted(folder.glob("*.json")):
        for place, step in enumerate(json.loads(file.read_text())):
            if place == len(added):
                added.append((step["name"], Counter()))
            values = {**step["stats"], "seconds": step["time_stats"]}
            # datatrove writes either a number, or a total with its spread.
            added[place][1].update(
                {
                    key: value["total"] if isinstance(value, dict) else value
                    for key, value in values.items()
                }
            )
    return added


def _step(name: str, stats: Stats, pipeline: Pipeline) -> dict[str, Any]:
    if name == "personal_data":
        kinds = {kind: stats[kind] for kind in ("emails", "ips", "phones") if stats[kind]}
        removed, numbers = 0, {"changed": stats["changed"], "reasons": kinds}
    else:
        start = "dropped_"
        dropped = {k.removeprefix(start): n for k, n in stats.items() if k.startswith(start)}
        reasons = dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))
        removed, numbers = stats["dropped"], {"reasons": reasons}
    folder = pipeline.removed / name
    kept = stats["total"] - removed
    shown = {"kept": kept, "folder": str(folder), "examples": _examples(folder)}
    return {"step": name, "read": stats["total"], "removed": removed, **numbers, **shown}


def _examples(folder: Path) -> list[dict[str, Any]]:
    """Return removed documents as examples, from as many files as possible."""
    files = sorted(folder.glob("*.jsonl"))
    files = files[:: max(1, len(files) // EXAMPLES)][:EXAMPLES]
    by_file = [[*_first(file, EXAMPLES)] for file in files]
    turns = (lines[turn] for turn in range(EXAMPLES) for lines in by_file if turn < len(lines))
    return [example for _, example in zip(range(EXAMPLES), turns, strict=False)]


def _first(file: Path, count: int) -> Iterator[dict[str, Any]]:
    for _, record in zip(range(count), _records(file), strict=False):
        metadata = record.get("metadata", {})
        text = " ".join(record["text"].split())
        yield {
            "text": text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}...",
            "reason": metadata.get("filter_reason", ""),
            "source": metadata.get("read_from", record.get("id", "")),
        }


def _records(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _sample(pipeline: Pipeline) -> dict[str, Document]:
    """Return the measured documents by name, as they were before any step."""
    files = sorted((pipeline.work / "sample").glob("*.jsonl"))
    documents = [from_json(record) for file in files for record in _records(file)]
    return {document.name: document for document in documents}


def _after_steps(pipeline: Pipeline, sample: Mapping[str, Document]) -> Iterator[dict[str, Any]]:
    """Yield size, quality and diversity of the sample after each step that removes documents."""
    left = dict(sample)
    yield {"step": "read", **Report((*left.values(),), {}).numbers()}
    ranks = {name.partition("-")[0] for name in sample}
    for step in pipeline.recipe.steps:
        if step == "personal_data":
            continue
        for rank in ranks:
            file = pipeline.removed / step / f"{rank}.jsonl"
            for record in _records(file) if file.exists() else ():
                left.pop(record["id"], None)
        yield {"step": step, **Report((*left.values(),), {}).numbers()}


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report as text for a terminal."""
    documents, characters = report["documents"], report["characters"]
    lines = [
        f"{report['corpus']}: {documents['read']:,} documents, {documents['written']:,} kept "
        f"({_share(documents)}); {characters['read']:,} characters, {characters['written']:,} kept "
        f"({_share(characters)})"
    ]
    for step in report["steps"]:
        if "changed" in step:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in step["reasons"].items())
            lines.append(f"{step['step']:<18} {step['changed']:>9,} changed  {kinds}")
            continue
        share = step["removed"] / max(1, step["read"])
        reasons = ", ".join(f"{name} {count:,}" for name, count in [*step["reasons"].items()][:4])
        lines.append(f"{step['step']:<18} {step['removed']:>9,} removed  {share:6.1%}  {reasons}")
    return "\n".join(line.rstrip() for line in lines)


# --- the page ---


def page_of(report: Values) -> str:
    """Return the report as an HTML page."""
    drawn = [_over_strictness(report), _chart_after_steps(report)]
    steps = " · ".join(_spaced(step["step"]) for step in report["steps"])
    body = "".join(
        (
            f"<header><h1>Cleaned: {escaped(report['corpus'])}</h1><p>{steps}</p></header>",
            _tiles(report),
            f"<section class=card><h2>What each step removed</h2>{_table(report)}</section>",
            f"<section class=charts>{''.join(map(html_of, drawn))}</section>",
            _rules(report),
            *(_examples_shown(step) for step in report["steps"]),
        )
    )
    return html_page(f"Cleaned: {report['corpus']}", body, by="tools/clean_data.py")


def _tiles(report: Values) -> str:
    documents, characters, after = report["documents"], report["characters"], report["after_steps"]
    first, last = after[0], after[-1]
    tiles = {
        "Documents kept": (
            _share(documents), f"{documents['written']:,} of {documents['read']:,}"
        ),
        "Characters kept": (
            _share(characters), f"{short(characters['written'])} of {short(characters['read'])}"
        ),
        "Common words": (f"{last['quality']:.1%}", f"{first['quality']:.1%} before"),
        "Different words": (
            f"{last['diversity']:,}", f"{first['diversity']:,} before, in the sample"
        ),
        "zlib bytes per character": (f"{last['packing']:.3f}", f"{first['packing']:.3f} before"),
    }  # fmt: skip
    shown = "".join(
        f"<div><span>{name}</span><b>{escaped(value)}</b><small>{escaped(note)}</small></div>"
        for name, (value, note) in tiles.items()
    )
    return f"<section class=tiles>{shown}</section>"


def _spaced(name: str) -> str:
    return escaped(name.replace("_", " "))


def _share(counts: Values) -> str:
    return f"{counts['written'] / max(1, counts['read']):.1%}"


def _table(report: Values) -> str:
    most = max(1, report["documents"]["read"])
    rows = []
    for step in report["steps"]:
        reasons = ", ".join(f"{name} {count:,}" for name, count in [*step["reasons"].items()][:4])
        reasons += ", ..." * (len(step["reasons"]) > 4)
        affected = step.get("changed", step["removed"])
        word = "changed" if "changed" in step else "removed"
        colour = "series-1" if "changed" in step else "series-2"
        parts = ((step["read"] - affected, "faint"), (affected, colour))
        bar = "".join(
            f'<i style="min-width:0;width:{100 * count / most:.2f}%;background:var(--{fill})"></i>'
            for count, fill in parts
        )
        rows.append(
            f"<tr><th>{_spaced(step['step'])}<small>{escaped(reasons)}</small></th>"
            f"<td class=bars><div class=bar>{bar}</div></td><td>{affected:,} {word}</td></tr>"
        )
    return f"<table class=rows>{''.join(rows)}</table>"


def _over_strictness(report: Values) -> Chart:
    points = report["strictness"]
    note = (
        f"Counted on {report['sample']['documents']:,} documents of this corpus, not by this "
        "recipe: six rules whose thresholds rise together, from keeping everything to prose alone. "
        "Quality: share of the 2,000 most frequent words of English prose; diversity: different "
        "words; size: characters."
    )
    x = [float(point["strictness"]) for point in points]
    return _chart("strictness", "over strictness", "strictness, %", points, x, note)


def _chart_after_steps(report: Values) -> Chart:
    points = report["after_steps"]
    names = ", ".join(
        f"{number} {point['step'].replace('_', ' ')}" for number, point in enumerate(points)
    )
    note, x = f"The same documents through this recipe: {names}.", [*map(float, range(len(points)))]
    return _chart("steps", "after each step", "step", points, x, note)


def _chart(
    name: str, title: str, axis: str, points: Sequence[Values], x: list[float], note: str
) -> Chart:
    curves = []
    for number, (key, label) in enumerate(_TITLES.items(), 1):
        y = [100 * point[key] / (points[0][key] or 1) for point in points]
        curves.append(Curve(label, f"var(--series-{number})", {name: x}, y, last=f"{y[-1]:.0f} %"))
    title = f"Size, quality and diversity {title}"
    unit, axes = "% of what was read", {name: axis}
    return Chart(name, title, unit, curves, note=note, axes=axes, from_zero=True)


def _rules(report: Values) -> str:
    names = [*dict.fromkeys(name for point in report["strictness"] for name in point["rejected"])]
    if not names:
        return ""
    head = "".join(f"<th>{_spaced(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{point['strictness']} %</td><td>{point['documents']:,}</td>"
        + "".join(f"<td>{point['rejected'].get(name, 0):,}</td>" for name in names)
        + "</tr>"
        for point in report["strictness"][::4]
    )
    return (
        "<section class=card><details><summary>Documents that each rule rejects, by strictness"
        f"</summary><div class=capped><table class=runs><tr><th>strictness</th><th>kept</th>{head}"
        f"</tr>{rows}</table></div></details></section>"
    )


def _examples_shown(step: Values) -> str:
    if not step["examples"]:
        return ""
    rows = "".join(
        f"<tr><td>{escaped(example['reason'])}</td><td>{escaped(example['text'])}"
        f"<br><small>{escaped(example['source'])}</small></td></tr>"
        for example in step["examples"]
    )
    word = "changed" if "changed" in step else "removed"
    shown = f"{len(step['examples'])} of the {step.get('changed', step['removed']):,} documents"
    return (
        f"<section class=card><details><summary>{_spaced(step['step'])}: {shown} that it {word}"
        f"</summary><div class=capped><table class=plan>{rows}</table></div>"
        f"<p class=note>All of them: <code>{escaped(step['folder'])}</code></p></details></section>"
    )
