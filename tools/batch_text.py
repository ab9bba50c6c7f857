"""Formats a step's windows as text: the model's input, with the learned tokens marked."""

import itertools
from collections.abc import Iterator
from typing import Any

from harness.config.batch import Curriculum
from harness.data.batch import Batch
from harness.data.batches import Sample
from harness.data.data import Data
from harness.data.packing import IGNORED

GREEN, RESET = "\033[32m", "\033[0m"
MOST_WINDOWS, MOST_EXAMPLES, MOST_TOKENS = 4, 8, 100
"""Limits per step, per window and at each end of an example, unless everything is requested."""


def first_sample_of(events: list[dict[str, Any]], step: int, curriculum: Curriculum) -> int:
    """Return the first sample of `step` (from 1). A run that rolled back has skipped samples."""
    jumps: dict[int, int] = {}  # step -> samples consumed before the next step
    for event in events:
        to = {"rollback": "to_step", "resumed": "step"}.get(event["kind"])
        if to is not None:
            # Discard jumps after that step, and one at it unless it is made again.
            jumps = {at: samples for at, samples in jumps.items() if at < event[to]}
        if event["kind"] == "rollback":
            jumps[event["to_step"]] = event["samples_skipped"][1]
    before, samples = max((jump for jump in jumps.items() if jump[0] < step), default=(0, 0))
    return curriculum.samples_after(step - before - 1, samples)


def positions_of(batch: Batch, pieces: int) -> list[int] | None:
    """Return the positions of a sample that is read as `pieces` consecutive sequences."""
    positions = batch.cut(pieces).position_ids
    return None if positions is None else positions.flatten().tolist()


def show_step(
    data: Data,
    step: int,
    global_batch: int,
    first: int,
    pieces: int = 1,
    *,
    color: bool = False,
    ids: bool = False,
    whole: bool = True,
) -> str:
    """Return the windows of `step` (from 1), beginning with `first`, as the text of their examples.
    Learned tokens are green (`color`) or in «».

    `ids` adds each token's id, target ("-" if it has none) and position, with a window read as
    `pieces` sequences. `whole` shows all windows, in full.
    """
    targets, tokens = data.train.targets_in(first, global_batch), global_batch * data.train.seq_len
    shown = global_batch if whole else min(global_batch, MOST_WINDOWS)
    marked = "green" if color else "in «»"
    lines = [
        f"step {step}: windows {first} to {first + global_batch - 1}, {targets:,} of {tokens:,} "
        f"tokens are learned, {marked}; data {data.fingerprint[:16]}"
    ]
    for index in range(first, first + shown):
        sample = data.train.sample(index)
        lines += ["", _heading(data, index, sample), *_examples(data, sample, color, whole)]
        lines += _numbers(sample.batch, pieces) if ids else []
    if shown < global_batch:
        lines += ["", f"{global_batch - shown:,} more windows: --all; token ids and targets: --ids"]
    elif not (whole or ids):
        lines += ["", "in full: --all; token ids and targets: --ids"]
    return "\n".join(lines)


def _heading(data: Data, index: int, sample: Sample) -> str:
    source = f"{name}, " if (name := data.sources[sample.source].name) else ""
    examples = f"{len(sample.spans)} example{'s' * (len(sample.spans) != 1)}"
    return (
        f"window {index}: {examples} ({source}epoch {sample.epoch}, window {sample.window} of it)"
    )


def _examples(data: Data, sample: Sample, color: bool, whole: bool) -> Iterator[str]:
    """Yield the examples of a window: number, token range [first:end) and file, then the text."""
    tokens = _tokens(sample.batch)
    for number, span in enumerate(sample.spans):
        if number == MOST_EXAMPLES and not whole:
            yield f"  {len(sample.spans) - number:,} more examples"
            return
        file = data.sources[sample.source].corpus.name_of(span.document)
        yield f"  example {span.document} [{span.first}:{span.last}] {file}".rstrip()
        own = tokens[span.column : span.column + span.last - span.first]
        yield f"    {_text(data, own, color, whole)}"
    end = max((span.column + span.last - span.first for span in sample.spans), default=0)
    if len(tokens) > end:
        yield f"  padding of {len(tokens) - end:,} tokens"


def _tokens(batch: Batch) -> list[tuple[int, bool]]:
    """Return the tokens of a window, each with True if it is learned; the last one is only a
    target.
    """
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    learned = [False, *(label != IGNORED for label in labels)]
    return [*zip([*ids, *labels[-1:]] if learned[-1] else ids, learned, strict=False)]


def _text(data: Data, tokens: list[tuple[int, bool]], color: bool, whole: bool) -> str:
    """Return the text of tokens on one line, with marks around the learned ones."""
    if whole or len(tokens) <= 2 * MOST_TOKENS:
        return _marked(data, tokens, color)
    begin, end = tokens[:MOST_TOKENS], tokens[-MOST_TOKENS:]
    between = f" ... {len(tokens) - 2 * MOST_TOKENS:,} tokens ... "
    return _marked(data, begin, color) + between + _marked(data, end, color)


def _marked(data: Data, tokens: list[tuple[int, bool]], color: bool) -> str:
    opens, closes = (GREEN, RESET) if color else ("«", "»")
    texts = []
    for is_learned, run in itertools.groupby(tokens, key=lambda token: token[1]):
        text = repr(data.tokenizer.decode([token for token, _ in run]))[1:-1]
        texts.append(f"{opens}{text}{closes}" if is_learned else text)
    return "".join(texts)


def _numbers(batch: Batch, pieces: int) -> list[str]:
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    lines = [
        f"  ids       {' '.join(map(str, ids))}",
        f"  targets   {' '.join('-' if label == IGNORED else str(label) for label in labels)}",
    ]
    if (positions := positions_of(batch, pieces)) is not None:
        lines.append(f"  positions {' '.join(map(str, positions))}")
    return lines
