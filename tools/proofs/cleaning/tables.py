"""Tables of recall, counts and rates."""

from __future__ import annotations

import io
import json
import random
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

from harness.report.words import short
from tools.proofs.cleaning.planted import (
    FILE_BYTES,
    FILES,
    drawn_secret,
    frequent_words,
    near_duplicate,
    prose,
)
from tools.workers import cores

_NEAR = 200
_SECRETS = 200
KINDS = ("email", "IP", "phone")


def recall(folder: Path, duplicates: int = _NEAR, of_a_kind: int = _SECRETS) -> str:
    """Return the table of planted duplicates and personal data that the light recipe finds: so many
    equal documents, as many near ones, and so many secrets of each kind.
    """
    from tools.clean_data import main as clean

    folder.mkdir()
    draw, words = random.Random(1), frequent_words()
    rows: list[tuple[str, str]] = []  # (kind, text)
    originals = [prose(draw, words, 200) for _ in range(2 * duplicates)]
    rows += [("original", text) for text in originals]
    rows += [("exact", text) for text in originals[:duplicates]]
    similar = []
    for text in originals[duplicates:]:
        near, likeness = near_duplicate(draw, text, words)
        similar.append(likeness)
        rows.append(("near", near))
    secrets = [(kind, drawn_secret(draw, kind)) for kind in KINDS for _ in range(of_a_kind)]
    for _, secret in secrets:
        before, after = prose(draw, words, 60), prose(draw, words, 60)
        rows.append(("secret", f"{before} Write or call {secret} today. {after}"))
    draw.shuffle(rows)
    path = folder / "planted.jsonl"
    path.write_text("".join(json.dumps({"text": t, "kind": k}) + "\n" for k, t in rows))
    with redirect_stdout(io.StringIO()):
        assert clean([str(path), str(folder / "out"), "gopher_quality=false"]) == 0
    whole = "".join(file.read_text() for file in (folder / "out" / "data").glob("*.jsonl"))
    removed = {
        step: sum(
            len(file.read_text().splitlines())
            for file in (folder / "out" / "removed" / step).glob("*")
        )
        for step in ("exact_duplicates", "near_duplicates")
    }
    lines = [
        "## Recall",
        "",
        "| planted | count | found | recall | required | holds |",
        "|---|---|---|---|---|---|",
        _row("equal documents", duplicates, removed["exact_duplicates"], 1.0),
        _row(
            f"near duplicates, Jaccard {min(similar):.3f} to {max(similar):.3f} of 5-grams",
            len(similar), removed["near_duplicates"], 0.95,
        ),
    ]  # fmt: skip
    for kind in KINDS:
        planted = [secret for of, secret in secrets if of == kind]
        lines.append(
            _row(f"{kind}: {planted[0]}", len(planted), sum(s not in whole for s in planted), 1.0)
        )
    return "\n".join(lines)


def _row(name: str, count: int, recalled: int, required: float) -> str:
    recall = recalled / count
    verdict = "yes" if required <= recall <= 1 else "**no**"
    return f"| {name} | {count} | {recalled} | {recall:.1%} | {required:.0%} | {verdict} |"


def counts(tool: Path, bare: Path) -> str:
    """Return the table of each step's count by both."""
    report = json.loads((tool / "report.json").read_text())
    of_bare: dict[str, dict[str, Any]] = {}
    for file in sorted((bare / "logs").glob("*/stats.json")):
        of_bare |= {step["name"]: step["stats"] for step in json.loads(file.read_text())}
    from tools.cleaning.report import step_name, total_of  # datatrove

    by_name = {step_name(name): stats for name, stats in of_bare.items()}
    lines = [
        "## Counts",
        "",
        "| step | read | removed | by bare datatrove | equal |",
        "|---|---|---|---|---|",
    ]
    for step in report["steps"]:
        stats = by_name[step["step"]]
        total, dropped = int(total_of(stats["total"])), int(total_of(stats.get("dropped", 0)))
        same = "yes" if (total, dropped) == (step["read"], step["removed"]) else "**no**"
        lines.append(
            f"| {step['step'].replace('_', ' ')} | {step['read']:,} | {step['removed']:,} | "
            f"{total:,}, {dropped:,} | {same} |"
        )
    texts = [_texts(folder / "data") for folder in (tool, bare)]
    same = "the same" if texts[0] == texts[1] else "**no**t the same"
    lines += ["", f"Both wrote {same} {len(texts[0]):,} documents, byte for byte."]
    return "\n".join(lines)


def _texts(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]


def rates(
    title: str,
    copies: int,
    ours: str,
    theirs: str,
    own: list[dict[str, float]],
    other: list[dict[str, float]],
) -> str:
    """Return the table of rates over `copies` of the corpus, medians over alternating runs."""
    size = copies * FILES * FILE_BYTES
    lines = [
        f"## {title}",
        "",
        f"{len(own)} alternating runs each, {cores()} cores, {size / 1e6:.0f} MB of text; medians.",
        "",
        "| | MB/s | MB for each second of CPU |",
        "|---|---|---|",
    ]
    by_name = {}
    for name, runs in ((ours, own), (theirs, other)):
        by_name[name] = [
            median(size / run[key] / 1e6 for run in runs) for key in ("seconds", "cpu")
        ]
        lines.append(f"| {name} | {short(by_name[name][0])} | {short(by_name[name][1])} |")
    ratios = [a / b for a, b in zip(by_name[ours], by_name[theirs], strict=True)]
    verdict = "yes" if ratios[0] >= 0.9 else "**no**"
    lines.append(
        f"| ratio (required of MB/s: 0.9; holds: {verdict}) | {ratios[0]:.2f} | {ratios[1]:.2f} |"
    )
    return "\n".join(lines)
