"""The training of both sides: no library's defaults, and data that is learnable and uneven."""

import functools
from dataclasses import replace

import torch

from harness.data.batch import Batch
from tests.gates.cell import GLOBAL_BATCH, HELD_OUT_SAMPLES
from tests.gates.models import SEQ_LEN, VOCAB_SIZE

SEED = 0
LR = 4e-3  # the largest
BETAS = (0.8, 0.97)
EPS = 1e-5
WEIGHT_DECAY = 0.1
CLIP_NORM = 0.5  # below most of the norms, so that most steps are clipped
ADAMW = {
    "name": "adamw",
    "lr": LR,
    "betas": BETAS,
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
    "clip_norm": CLIP_NORM,
}
# One step that is large compared with the weights: after a small one, the change of a norm's weight
# would only be known to the last place of 1.0.
SGD_LR = 64.0
# Parameters with their own learning rate and decay; every decoder layer has some.
GROUP_PATTERN = "attn|attention[.]"
GROUP_LR_MULTIPLIER = 0.5
GROUP_WEIGHT_DECAY = 0.3

DOCUMENT_TOKENS = 11  # does not divide SEQ_LEN: documents end within samples


def learning_rate(step: int) -> float:
    """Return the rate of a step, counted from 0; neighbouring steps have very different rates."""
    return LR * (1.0, 0.4, 0.8, 0.2, 0.6)[step % 5]


@functools.cache
def global_batch(step: int) -> Batch:
    """Return the global batch of one step, (GLOBAL_BATCH, SEQ_LEN) on the CPU. Callers copy it
    before changing it.

    Tokens follow a fixed permutation within a document, so a model that attends learns quickly.
    Samples contain documents that must not see each other (`position_ids` restart), and prompts of
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
                # Few different starts, so that the loss falls well within the gate's few steps.
                current = torch.randint(0, 16, (), generator=generator)
            tokens[row, column] = current
            current = successor[current]
        positions[row] = torch.arange(SEQ_LEN) % DOCUMENT_TOKENS
    labels = tokens[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : (row * row) % SEQ_LEN] = -100
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def paired(batch: Batch) -> Batch:
    """Return a batch whose first two documents of each row are a preference pair, with a reference
    that no weights have. Of some pairs, a side has no target.
    """
    begins = (batch.position_ids == 0).cumsum(1) - 1
    numbers = 2 * torch.arange(len(begins))[:, None] + begins
    segments = torch.where(begins < 2, numbers, -1)
    labels = batch.labels.masked_fill(segments < 0, -100)
    generator = torch.Generator().manual_seed(int(batch.input_ids.sum()))
    reference = -8 * torch.rand(len(begins), 2, generator=generator)
    return replace(batch, labels=labels, segments=segments, reference=reference)


def held_out() -> Batch:
    """Return evaluation samples, never trained on, (HELD_OUT_SAMPLES, SEQ_LEN) on the CPU."""
    several = [global_batch(10_000 + number) for number in range(2)]
    columns = zip(*((b.input_ids, b.labels, b.position_ids) for b in several), strict=True)
    both = Batch(*(torch.cat(tensors) for tensors in columns))
    return rows(both, list(range(HELD_OUT_SAMPLES)))


def rows(batch: Batch, chosen: list[int]) -> Batch:
    """Return the chosen samples of a batch, in that order."""
    if batch.segments is None or batch.reference is None:
        return Batch(batch.input_ids[chosen], batch.labels[chosen], batch.position_ids[chosen])
    own = batch.segments[chosen]
    segments = torch.where(own < 0, -1, own % 2 + 2 * torch.arange(len(chosen))[:, None])
    tensors = (batch.input_ids, batch.labels, batch.position_ids, batch.reference)
    ids, labels, positions, reference = (tensor[chosen] for tensor in tensors)
    return Batch(ids, labels, positions, segments=segments, reference=reference)


def targets(batch: Batch) -> int:
    """Return the number of target tokens, or of pairs, in a batch."""
    if batch.segments is not None:
        return batch.num_pairs
    return int((batch.labels != -100).sum())
