"""Keeps a sample of what a run has read in its run folder, for data.rehearse of later runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.checkpoint.store import fsync
from harness.data.batches import Stream
from harness.data.packing import Document
from harness.data.reservoir import reservoir, write_documents
from harness.data.tokenizer import tokenizer_hash
from harness.errors import ConfigError
from harness.files.kept_sample import FACTS, HELD_OUT, TRAIN, kept_facts
from harness.run.run import Run

MOST_TOKENS = 1 << 23
"""Tokens of either side that are kept at most."""


def keep_sample(run: Run) -> None:
    """Write the sample of all that was read so far, on rank 0; an event says if that fails."""
    if not (run.plan.config.data.reservoir and run.state.samples):
        return
    run.pulse("save", run.state.step)  # on all ranks: the hang report compares their counts
    if not run.is_writer:
        return
    folder = run.folder.reservoir_dir
    try:
        _write(run, folder)
    except (OSError, ConfigError) as error:
        message = f"no sample of the data was kept in {folder}: {error}"
        run.event("sample_not_kept", step=run.state.step, message=message)
        run.progress.say(message)
    run.meter.restart()


def _write(run: Run, folder: Path) -> None:
    """Write the folder anew, and put it in the place of the last one.

    Raises ConfigError if that is of other data (resume.allow=data_fingerprint), which it may be all
    that is left of.
    """
    unfinished, replaced = (folder.with_name(f".{of}-{folder.name}") for of in ("new", "old"))
    if replaced.exists() and not folder.exists():  # killed between the two renames
        replaced.rename(folder)
    data, seen = run.data, run.state.samples
    key = f"{run.plan.config.train.seed}:{data.fingerprint}"
    if folder.exists() and kept_facts(folder).get("of") != key:
        raise ConfigError("it holds a sample of other data, read before: move it to keep another")
    for path in (unfinished, replaced):
        shutil.rmtree(path, ignore_errors=True)
    unfinished.mkdir()
    if data.mixture() is None:  # after an epoch the same documents come again
        seen = min(seen, data.train.samples)
    config, most = run.plan.config, max(1, MOST_TOKENS // (run.plan.config.data.seq_len + 1))
    kept = reservoir(min(config.data.reservoir, most), seen, key).tolist()
    held_out = range(min(config.eval.samples, most, data.held_out.samples))
    facts: dict[str, Any] = {"of": key, "tokenizer": tokenizer_hash(data.tokenizer)}
    for side, stream, samples in (
        (TRAIN, data.train, kept),
        (HELD_OUT, data.held_out, held_out),
    ):
        facts[f"{side}_tokens"] = _write_side(unfinished / side, stream, samples, data.vocab_size)
    (unfinished / FACTS).write_text(json.dumps(facts))
    for path in unfinished.iterdir():
        fsync(path)
    if folder.exists():
        folder.rename(replaced)
    unfinished.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_side(
    prefix: Path, stream: Stream, samples: Iterable[int], vocab_size: int
) -> int | None:
    """Write samples as a .bin/.idx pair; return the tokens of each, None if they differ."""
    sizes = set[int]()

    def documents() -> Iterator[Document]:
        for index in samples:
            of_sample = stream.documents_of(index)
            sizes.add(sum(len(ids) for ids, _ in of_sample))
            yield from of_sample

    write_documents(prefix, vocab_size, documents())
    return sizes.pop() if len(sizes) == 1 else None
