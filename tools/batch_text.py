"""A step's samples as text: what the model sees, exactly."""

from __future__ import annotations

import itertools
from typing import Any

from harness.config.curriculum import Curriculum
from harness.data.batch import Batch
from harness.data.batches import Sample
from harness.data.data import Data
from harness.data.packing import IGNORED

GREEN, RESET = "\033[32m", "\033[0m"


def first_sample_of(events: list[dict[str, Any]], step: int, curriculum: Curriculum) -> int:
    """Return the first sample of `step` (from 1); a run that rolled back has skipped samples."""
    jumps: dict[int, int] = {}  # step -> samples that lie behind it
    for event in events:
        to = {"rollback": "to_step", "resumed": "step"}.get(event["kind"])
        if to is not None:
            # What came after that step is undone; a jump at it, unless it is made again.
            jumps = {at: samples for at, samples in jumps.items() if at < event[to]}
        if event["kind"] == "rollback":
            jumps[event["to_step"]] = event["samples_skipped"][1]
    before, samples = max((jump for jump in jumps.items() if jump[0] < step), default=(0, 0))
    return curriculum.samples_after(step - before - 1, samples)


def positions_of(batch: Batch, pieces: int) -> list[int] | None:
    """Positions of a sample that is read as `pieces` sequences, one after the other."""
    positions = batch.cut(pieces).position_ids
    return None if positions is None else positions.flatten().tolist()


def show_step(
    data: Data, step: int, global_batch: int, first: int, pieces: int = 1, *, color: bool = False
) -> str:
    """The samples of `step` (from 1), `first` and those after it: ids, targets ("-" where none),
    documents and text; each sample is read as `pieces` sequences. `color`: targets are green.
    """
    targets = data.train.targets_in(first, global_batch)
    lines = [
        f"step {step}: samples {first} to {first + global_batch - 1}, {targets} target tokens, "
        f"data {data.fingerprint[:16]}"
    ]
    for index in range(first, first + global_batch):
        lines += [
            "",
            f"sample {index} {_sample_text(data, data.train.sample(index), pieces, color)}",
        ]
    return "\n".join(lines)


def _sample_text(data: Data, sample: Sample, pieces: int, color: bool) -> str:
    source = f"{name}, " if (name := data.sources[sample.source].name) else ""
    documents = [
        f"{span.document} [{span.first}:{span.last}] "
        f"{data.sources[sample.source].corpus.name_of(span.document)}".rstrip()
        for span in sample.spans
    ]
    batch = sample.batch
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    lines = [
        f"({source}epoch {sample.epoch}, window {sample.window})",
        f"documents {'; '.join(documents)}",
        f"ids       {' '.join(map(str, ids))}",
        f"targets   {' '.join('-' if label == IGNORED else str(label) for label in labels)}",
    ]
    if (positions := positions_of(batch, pieces)) is not None:
        lines.append(f"positions {' '.join(map(str, positions))}")
    text = _colored(data, ids, labels) if color else repr(data.tokenizer.decode(ids))
    lines.append(f"text      {text}")
    return "\n  ".join(lines)


def _colored(data: Data, ids: list[int], labels: list[int]) -> str:
    """The text of a sample and its last target, with the targets in green."""
    learned = [label != IGNORED for label in labels]
    tokens = [*ids, *labels[-1:]] if learned[-1] else ids
    parts = itertools.groupby(
        zip(tokens, [False, *learned], strict=False), key=lambda token: token[1]
    )
    texts = []
    for is_learned, run in parts:
        text = repr(data.tokenizer.decode([token for token, _ in run]))[1:-1]
        texts.append(f"{GREEN}{text}{RESET}" if is_learned else text)
    return f"'{''.join(texts)}'"
