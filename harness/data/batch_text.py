"""Formats a step's windows, or the first rows of the data, with the learned tokens marked."""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.config.batch import Curriculum
from harness.data.batch import Batch
from harness.data.batches import Sample, Stream
from harness.data.data import Data
from harness.data.packing import IGNORED, Span
from harness.data.run_tokenizer import build_tokenizer
from harness.data.source import Source, open_source
from harness.data.spec import DataSpec
from harness.files.corpus import ReadLimit
from harness.terminal import Parts, marked

Tokens = list[tuple[int, bool]]
"""Token ids, each with True if it is learned."""
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
    how = "green" if color else "in «»"
    lines = [
        f"step {step}: windows {first} to {first + global_batch - 1}, {targets:,} of {tokens:,} "
        f"tokens are learned, {how}; data {data.fingerprint[:16]}"
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
    for number, span in enumerate(sample.spans):
        if number == MOST_EXAMPLES and not whole:
            yield f"  {len(sample.spans) - number:,} more examples"
            return
        heading, tokens = _example(span, sample, data.sources[sample.source])
        yield f"  {heading}"
        yield f"    {_text(data.tokenizer, tokens, color, whole)}"
    end = max((span.column + span.last - span.first for span in sample.spans), default=0)
    if (left := len(_tokens(sample.batch)) - end) > 0:
        yield f"  padding of {left:,} tokens"


def _example(span: Span, sample: Sample, source: Source) -> tuple[str, Tokens]:
    """Return the heading of an example, with its token range [first:end), and its tokens."""
    heading = f"example {span.document} [{span.first}:{span.last}]"
    tokens = _tokens(sample.batch)[span.column : span.column + span.last - span.first]
    return f"{heading} {source.corpus.name_of(span.document)}".rstrip(), tokens


def preview(spec: DataSpec, number: int) -> dict[str, Parts]:
    """Return the `number` first examples of each source by heading, as training reads them, in the
    order of the rows and with held-out ones. Keeps nothing; trains a tokenizer on the first rows if
    the data has none. Raises ConfigError.
    """
    shown = dict[str, Parts]()
    with tempfile.TemporaryDirectory() as cache:
        config = spec.config.model_copy(update={"cache_dir": cache})
        spec = replace(spec, config=config, limit=ReadLimit())
        tokenizer = build_tokenizer(spec, lambda line: None)
        for name, part in spec.sources().items():
            source = open_source(name, part, tokenizer, Path(cache), lambda line: None)
            streams = (Stream(side, 0, "", document_mask=False) for side in source.sides.values())
            samples = (stream.sample(n) for stream in streams for n in range(stream.samples))
            own = [(span, sample) for sample in samples for span in sample.spans]
            own.sort(key=lambda one: (one[0].document, one[0].first))
            for span, sample in own[:number]:
                heading, tokens = _example(span, sample, source)
                shown[f"{name}: {heading}" if name else heading] = _parts(tokenizer, tokens)
    return shown


def _tokens(batch: Batch) -> Tokens:
    """Return the tokens of a window; the last one is only a target."""
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    learned = [False, *(label != IGNORED for label in labels)]
    return [*zip([*ids, *labels[-1:]] if learned[-1] else ids, learned, strict=False)]


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Tokens, color: bool, whole: bool) -> str:
    """Return the text of tokens on one line, with marks around the learned ones."""
    if whole or len(tokens) <= 2 * MOST_TOKENS:
        return marked(_parts(tokenizer, tokens), color=color)
    ends = tokens[:MOST_TOKENS], tokens[-MOST_TOKENS:]
    begin, end = (marked(_parts(tokenizer, part), color=color) for part in ends)
    return f"{begin} ... {len(tokens) - 2 * MOST_TOKENS:,} tokens ... {end}"


def _parts(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> Parts:
    """Return the text of each run of tokens that are learned, or not."""
    return [
        (str(tokenizer.decode([token for token, _ in run])), is_learned)
        for is_learned, run in itertools.groupby(tokens, key=lambda token: token[1])
    ]


def _numbers(batch: Batch, pieces: int) -> list[str]:
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    lines = [
        f"  ids       {' '.join(map(str, ids))}",
        f"  targets   {' '.join('-' if label == IGNORED else str(label) for label in labels)}",
    ]
    if (positions := positions_of(batch, pieces)) is not None:
        lines.append(f"  positions {' '.join(map(str, positions))}")
    return lines
