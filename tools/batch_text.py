"""A step's samples as text: what the model sees, exactly."""

from __future__ import annotations

from harness.data.batches import Sample
from harness.data.build import Data
from harness.data.packing import IGNORED


def show_step(data: Data, step: int, global_batch: int) -> str:
    """The samples of `step` (from 1): ids, targets ("-" where none), documents and text."""
    first = (step - 1) * global_batch
    targets = data.train.targets_in(first, global_batch)
    lines = [
        f"step {step}: samples {first} to {first + global_batch - 1}, {targets} target tokens, "
        f"data {data.fingerprint[:16]}"
    ]
    for index in range(first, first + global_batch):
        lines += ["", f"sample {index} {_sample_text(data, data.train.sample(index))}"]
    return "\n".join(lines)


def _sample_text(data: Data, sample: Sample) -> str:
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
    if batch.position_ids is not None:
        lines.append(f"positions {' '.join(map(str, batch.position_ids[0].tolist()))}")
    lines.append(f"text      {data.tokenizer.decode(ids)!r}")
    return "\n  ".join(lines)
