"""Readers of a large corpus: ours in several batchings, Megatron-LM's and datatrove's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness.config.curriculum import Curriculum
from harness.config.data_section import DataConfig, MixSource
from harness.data.build import build_data
from harness.data.spec import DataSpec
from tools.proofs.data_scale.corpus import Made

SEQ_LEN, BATCH, MICRO_BATCH, RANKS = 2048, 512, 8, 64
RESUMED_STEP = 100_000
Begin = Callable[[int], Iterator[Any]]
"""The micro-batches of rank 0 from an optimizer step on."""


def ours(made: Made, folder: Path, **settings: Any) -> Begin:
    """Open the corpus as a run does."""
    paths: dict[str, Any] = {"path": made.prefix}
    if settings.pop("mixed", False):
        both = [MixSource(path=made.prefix, name=name, share=share) for name, share in SHARES]
        paths = {"mix": both}
    config = DataConfig(
        **paths,
        tokenizer=made.tokenizer,
        seq_len=SEQ_LEN,
        cache_dir=str(folder / "cache"),
        **settings,
    )
    data = build_data(DataSpec(config))

    def begin(step: int) -> Iterator[Any]:
        return data.train.steps(
            step * BATCH, curriculum=Curriculum(BATCH), micro_batch=MICRO_BATCH, data_ranks=RANKS
        )

    return begin


SHARES = (("first", 0.7), ("second", 0.3))


def megatron(made: Made, folder: Path) -> Begin:
    """Open it as Megatron-LM's pretraining does: a GPTDataset, with its cached indices."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, 512, {"name": "made"}

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LEN,
        blend=([made.prefix], None),
        split="100,0,0",
        path_to_cache=str(folder / "megatron"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
    )
    indexed = IndexedDataset(made.prefix, mmap=True)
    import numpy as np

    samples = (RESUMED_STEP + 10) * BATCH
    every = np.arange(len(indexed), dtype=np.int32)
    dataset = GPTDataset(indexed, made.prefix, every, samples, Split.train, config)

    def begin(step: int) -> Iterator[Any]:
        for at in range(step, RESUMED_STEP + 10):
            yield [dataset[at * BATCH + row] for row in range(MICRO_BATCH)]

    return begin


def datatrove(made: Made, folder: Path) -> Begin:
    """Open it as datatrove's own data set of tokens; the order is that of the file."""
    from datatrove.utils.dataset import DatatroveFolderDataset

    shard = folder / "datatrove" / "shard.ds"
    if not shard.exists():
        shard.parent.mkdir()
        shard.symlink_to(Path(f"{made.prefix}.bin"))
    dataset = DatatroveFolderDataset(str(shard.parent), SEQ_LEN, token_size=2)

    def begin(step: int) -> Iterator[Any]:
        for at in range(step, RESUMED_STEP + 10):
            rows = range(at * BATCH, at * BATCH + MICRO_BATCH)
            yield [dataset[row % len(dataset)] for row in rows]

    return begin


CASES: dict[str, Callable[[Made, Path], Begin]] = {
    "packed": ours,
    "packed whole": partial(ours, packing="whole", document_mask=True),
    "length_grouped": partial(ours, batching="length_grouped"),
    "token_budget": partial(ours, batching="token_budget"),
    "mixture": partial(ours, mixed=True),
    "Megatron-LM": megatron,
    "datatrove": datatrove,
}


BUILDS = ("packed", "packed whole", "length_grouped", "Megatron-LM")
"""Those whose index is not that of one before."""


def forget(case: str, folder: Path) -> None:
    """Remove what a case has built."""
    name = {"Megatron-LM": "megatron", "datatrove": "datatrove"}.get(case)
    if name is not None:
        shutil.rmtree(folder / name, ignore_errors=True)
        return
    for built in ("split", "whole"):
        for path in (folder / "cache").glob(f"{built}-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
