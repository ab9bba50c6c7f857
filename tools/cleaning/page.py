"""The report of a cleaning as a page: one file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.chart import Chart, Curve, html_of
from harness.report.page import document
from harness.report.words import escaped, short

Values = Mapping[str, Any]
_TITLES = {"characters": "size", "quality": "quality", "diversity": "diversity"}


def page_of(report: Values) -> str:
    """Return the page."""
    drawn = [_over_strictness(report), _after_steps(report)]
    body = "".join(
        (
            f"<header><h1>Cleaned: {escaped(report['corpus'])}</h1><p>{escaped(_steps(report))}</p>"
            "</header>",
            _tiles(report),
            f"<section class=card><h2>What each step removed</h2>{_table(report)}</section>",
            f"<section class=charts>{''.join(map(html_of, drawn))}</section>",
            _rules(report),
            *(_examples(step) for step in report["steps"]),
        )
    )
    return document(f"Cleaned: {report['corpus']}", body, by="tools/clean_data.py")


def _steps(report: Values) -> str:
    return " · ".join(step["step"].replace("_", " ") for step in report["steps"])


def _tiles(report: Values) -> str:
    documents, characters, after = report["documents"], report["characters"], report["after_steps"]
    first, last = after[0], after[-1]
    tiles = [
        (
            "Documents kept",
            f"{_share(documents)}",
            f"{documents['written']:,} of {documents['read']:,}",
        ),
        (
            "Characters kept",
            f"{_share(characters)}",
            f"{short(characters['written'])} of {short(characters['read'])}",
        ),
        ("Common words", f"{last['quality']:.1%}", f"{first['quality']:.1%} before"),
        (
            "Different words",
            f"{last['diversity']:,}",
            f"{first['diversity']:,} before, in the sample",
        ),
        ("zlib bytes a character", f"{last['packing']:.3f}", f"{first['packing']:.3f} before"),
    ]
    return "<section class=tiles>{}</section>".format(
        "".join(
            f"<div><span>{name}</span><b>{escaped(value)}</b><small>{escaped(note)}</small></div>"
            for name, value, note in tiles
        )
    )


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


def _relative(points: Sequence[Values], key: str) -> list[float]:
    first = points[0][key] or 1
    return [100 * point[key] / first for point in points]


def _curves(points: Sequence[Values], axis: str, x: list[float]) -> list[Curve]:
    curves = []
    for number, (key, name) in enumerate(_TITLES.items(), 1):
        y = _relative(points, key)
        colour = f"var(--series-{number})"
        curves.append(Curve(name, colour, {axis: x}, y, last=f"{y[-1]:.0f} %"))
    return curves


def _over_strictness(report: Values) -> Chart:
    points = report["strictness"]
    return Chart(
        "strictness",
        "Size, quality and diversity over strictness",
        "% of what was read",
        _curves(points, "strictness", [float(point["strictness"]) for point in points]),
        note=f"Counted on {report['sample']['documents']:,} documents of this corpus, not by this "
        "recipe: six rules whose thresholds rise together, from keeping everything to prose alone. "
        "Quality: share of the 2,000 most frequent words of English prose; diversity: different "
        "words; size: characters.",
        axes={"strictness": "strictness, %"},
        from_zero=True,
    )


def _after_steps(report: Values) -> Chart:
    points = report["after_steps"]
    names = ", ".join(
        f"{number} {point['step'].replace('_', ' ')}" for number, point in enumerate(points)
    )
    return Chart(
        "steps",
        "Size, quality and diversity after each step",
        "% of what was read",
        _curves(points, "steps", [float(number) for number in range(len(points))]),
        note=f"The same documents through this recipe: {names}.",
        axes={"steps": "step"},
        from_zero=True,
    )


def _rules(report: Values) -> str:
    names = [*dict.fromkeys(name for point in report["strictness"] for name in point["rejected"])]
    if not names:
        return ""
    head = "".join(f"<th>{escaped(name.replace('_', ' '))}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{point['strictness']} %</td><td>{point['documents']:,}</td>"
        + "".join(f"<td>{point['rejected'].get(name, 0):,}</td>" for name in names)
        + "</tr>"
        for point in report["strictness"][::4]
    )
    return (
        "<section class=card><details><summary>Documents that each rule rejects, by strictness"
        f"</summary><div class=scroll><table class=runs><tr><th>strictness</th><th>kept</th>{head}"
        f"</tr>{rows}</table></div></details></section>"
    )


def _examples(step: Values) -> str:
    if not step["examples"]:
        return ""
    rows = "".join(
        f"<tr><td>{escaped(of['reason'])}</td><td>{escaped(of['text'])}"
        f"<br><small>{escaped(of['source'])}</small></td></tr>"
        for of in step["examples"]
    )
    word = "changed" if "changed" in step else "removed"
    of = f"{len(step['examples'])} of the {step.get('changed', step['removed']):,} documents"
    return (
        f"<section class=card><details><summary>{_spaced(step['step'])}: {of} that it {word}"
        f"</summary><div class=scroll><table class=plan>{rows}</table></div>"
        f"<p class=note>All of them: <code>{escaped(step['folder'])}</code></p></details></section>"
    )
