"""The report of a cleaning, from datatrove's own statistics and the documents that it removed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tools.cleaning.pipeline import Pipeline, logs_of
from tools.cleaning.recipe import STEPS
from tools.cleaning.strictness import STRICTNESS, Document, Report, from_json, report_at

EXAMPLES = 20
_MOST_SHOWN = 400
_NAMES = {  # datatrove's name of a step, by a part of it
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


class Step(NamedTuple):
    """A step of a pipeline."""

    name: str
    stats: Counter[str]
    """datatrove's statistics, and the seconds in it."""


def report_of(pipeline: Pipeline, logs: Path) -> dict[str, Any]:
    """Return the report as plain values. Raises OSError."""
    stages = [
        _stats(logs_of(logs, number, stage) / "stats")
        for number, stage in enumerate(pipeline.stages(), 1)
    ]
    first, last = stages[0], stages[-1]
    reader, writer = first[0].stats, last[-1].stats
    # The exact filter runs twice, before the signatures and at the end: the later counts hold.
    by_name = {step_name(of.name): of.stats for stage in (first, last) for of in stage}
    steps = [
        _step(name, by_name[name], pipeline)
        for name in STEPS
        if getattr(pipeline.recipe, name) is not None
    ]
    sample = _sample(pipeline)
    return {
        "corpus": str(pipeline.corpus.path),
        "output": str(pipeline.data),
        "recipe": pipeline.recipe.model_dump(exclude_none=True),
        "documents": {
            "read": reader["documents"],
            "empty": reader["empty"],
            "written": writer["total"],
        },
        "characters": {"read": reader["doc_len"], "written": writer["doc_len"]},
        "steps": steps,
        "sample": {"documents": len(sample), "one_in": pipeline.sample_one_in},
        "after_steps": [*_after_steps(pipeline, sample)],
        "strictness": [
            {"strictness": at, **_trade_off(left), "rejected": dict(left.rejected)}
            for at, left in ((at, report_at(sample.values(), at)) for at in STRICTNESS)
        ],
        "cpu_seconds": {
            of.name: round(of.stats["seconds"], 3)
            for stage in stages
            for of in stage
            if of.stats["seconds"]
        },
    }


def _stats(folder: Path) -> list[Step]:
    """Return the statistics of a stage's steps, added up over its tasks."""
    added: list[Counter[str]] = []
    names: dict[int, str] = {}
    for file in sorted(folder.glob("*.json")):
        for place, step in enumerate(json.loads(file.read_text())):
            if place == len(added):
                added.append(Counter())
            added[place]["seconds"] += total_of(step["time_stats"])
            added[place].update({key: total_of(value) for key, value in step["stats"].items()})
            names[place] = step["name"]
    return [Step(name, stats) for name, stats in zip(names.values(), added, strict=True)]


def total_of(value: Any) -> float:
    """Return a statistic's total: datatrove writes a number, or one with its spread."""
    return value["total"] if isinstance(value, dict) else value


def step_name(name: str) -> str:
    """Return a recipe's name of a step of datatrove's."""
    return next((ours for part, ours in _NAMES.items() if part in name), name)


def _step(name: str, stats: Counter[str], pipeline: Pipeline) -> dict[str, Any]:
    if name == "personal_data":
        kinds = {kind: stats[kind] for kind in ("emails", "ips", "phones") if stats[kind]}
        numbers = {"changed": stats["changed"], "reasons": kinds, "removed": 0}
    else:
        reasons = {
            key.removeprefix("dropped_"): count
            for key, count in stats.items()
            if key.startswith("dropped_")
        }
        numbers = {"removed": stats["dropped"], "reasons": _sorted(reasons)}
    folder = pipeline.removed / name
    return {
        "step": name,
        "read": stats["total"],
        **numbers,
        "kept": stats["total"] - numbers["removed"],
        "folder": str(folder),
        "examples": _examples(folder),
    }


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _examples(folder: Path) -> list[dict[str, Any]]:
    """Return removed documents, from as many files as possible."""
    files = sorted(folder.glob("*.jsonl"))
    files = files[:: max(1, len(files) // EXAMPLES)][:EXAMPLES]
    by_file = [[*_first(file, EXAMPLES)] for file in files]
    turns = (of[turn] for turn in range(EXAMPLES) for of in by_file if turn < len(of))
    return [example for _, example in zip(range(EXAMPLES), turns, strict=False)]


def _first(file: Path, count: int) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for _, line in zip(range(count), lines, strict=False):
            record = json.loads(line)
            metadata = record.get("metadata", {})
            text = " ".join(record["text"].split())
            yield {
                "text": text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}...",
                "reason": metadata.get("filter_reason", ""),
                "source": metadata.get("source", record.get("id", "")),
            }


def _sample(pipeline: Pipeline) -> dict[str, Document]:
    """Return the measured documents, as they were read."""
    documents: dict[str, Document] = {}
    for file in sorted((pipeline.work / "sample").glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                document = from_json(json.loads(line))
                documents[document.name] = document
    return documents


def _after_steps(pipeline: Pipeline, sample: Mapping[str, Document]) -> Iterator[dict[str, Any]]:
    """Yield size, quality and diversity of the sample after each step that removes documents."""
    left = dict(sample)
    yield {"step": "read", **_trade_off(Report((*left.values(),), {}))}
    ranks = {name.partition("-")[0] for name in sample}
    for step in STEPS:
        if getattr(pipeline.recipe, step) is None or step == "personal_data":
            continue
        for rank in ranks:
            file = pipeline.removed / step / f"{rank}.jsonl"
            for name in _ids(file) if file.exists() else ():
                left.pop(name, None)
        yield {"step": step, **_trade_off(Report((*left.values(),), {}))}


def _ids(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["id"]


def _trade_off(report: Report) -> dict[str, float]:
    return {
        "documents": len(report.kept),
        "characters": report.characters,
        "quality": round(report.quality, 5),
        "diversity": report.diversity,
        "packing": round(report.packing, 5),
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report for a terminal."""
    documents, characters = report["documents"], report["characters"]
    lines = [
        f"{report['corpus']}: {documents['read']:,} documents, {documents['written']:,} kept "
        f"({documents['written'] / max(1, documents['read']):.1%}); {characters['read']:,} "
        f"characters, {characters['written']:,} kept "
        f"({characters['written'] / max(1, characters['read']):.1%})"
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
