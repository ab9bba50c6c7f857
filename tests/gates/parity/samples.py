"""The gate's data: learnable in a few steps, and uneven on purpose."""

from __future__ import annotations

import functools

import torch

from harness.data.batch import Batch
from tests.gates.cells import GLOBAL_BATCH
from tests.gates.models import SEQ_LEN, VOCAB_SIZE
from tests.gates.parity.recipe import HELD_OUT_SAMPLES

DOCUMENT_TOKENS = 11  # does not divide SEQ_LEN: documents end in the middle of samples


@functools.cache
def global_batch(step: int) -> Batch:
    """The global batch of one step, (GLOBAL_BATCH, SEQ_LEN) on the CPU; whoever changes it copies.

    Tokens follow a fixed permutation within a document, so a model that attends learns quickly.
    Samples hold documents that must not see each other (`position_ids` restart), and prompts of
    very different lengths carry no loss: a mean over micro-batches instead of target tokens, a
    dropped sample or a dropped mask all change the result.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    successor = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(7))
    tokens = torch.empty(GLOBAL_BATCH, SEQ_LEN + 1, dtype=torch.int64)
    positions = torch.empty(GLOBAL_BATCH, SEQ_LEN, dtype=torch.int64)
    for row in range(GLOBAL_BATCH):
        for column in range(SEQ_LEN + 1):
            if column % DOCUMENT_TOKENS == 0:
                # Few different starts: the loss can fall well within the gate's few steps.
                current = torch.randint(0, 16, (), generator=generator)
            tokens[row, column] = current
            current = successor[current]
        positions[row] = torch.arange(SEQ_LEN) % DOCUMENT_TOKENS
    labels = tokens[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : (row * row) % SEQ_LEN] = -100
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def held_out() -> Batch:
    """Samples that are evaluated and never trained on, (HELD_OUT_SAMPLES, SEQ_LEN) on the CPU."""
    several = [global_batch(10_000 + number) for number in range(2)]
    columns = zip(*((b.input_ids, b.labels, b.position_ids) for b in several), strict=True)
    both = Batch(*(torch.cat(tensors) for tensors in columns))
    return rows(both, list(range(HELD_OUT_SAMPLES)))


def rows(batch: Batch, chosen: list[int]) -> Batch:
    """The given samples of a batch, in the given order."""
    return Batch(batch.input_ids[chosen], batch.labels[chosen], batch.position_ids[chosen])


def targets(batch: Batch) -> int:
    """Target tokens of a batch."""
    return int((batch.labels != -100).sum())
