"""A step's samples as text: what the model sees, exactly."""

from __future__ import annotations

from typing import Any

from harness.config.curriculum import Curriculum
from harness.data.batches import Batch, Sample
from harness.data.build import Data
from harness.data.packing import IGNORED


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


def show_step(data: Data, step: int, global_batch: int, first: int, pieces: int = 1) -> str:
    """The samples of `step` (from 1), `first` and those after it: ids, targets ("-" where none),
    documents and text; each sample is read as `pieces` sequences.
    """
    targets = data.train.targets_in(first, global_batch)
    lines = [
        f"step {step}: samples {first} to {first + global_batch - 1}, {targets} target tokens, "
        f"data {data.fingerprint[:16]}"
    ]
    for index in range(first, first + global_batch):
        lines += ["", f"sample {index} {_sample_text(data, data.train.sample(index), pieces)}"]
    return "\n".join(lines)


def _sample_text(data: Data, sample: Sample, pieces: int) -> str:
    documents = [
        f"{span.document} [{span.first}:{span.last}] {data.corpus.name_of(span.document)}".rstrip()
        for span in sample.spans
    ]
    batch = sample.batch
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    lines = [
        f"(epoch {sample.epoch}, window {sample.window})",
        f"documents {'; '.join(documents)}",
        f"ids       {' '.join(map(str, ids))}",
        f"targets   {' '.join('-' if label == IGNORED else str(label) for label in labels)}",
    ]
    if (positions := positions_of(batch, pieces)) is not None:
        lines.append(f"positions {' '.join(map(str, positions))}")
    lines.append(f"text      {data.tokenizer.decode(ids)!r}")
    return "\n  ".join(lines)
