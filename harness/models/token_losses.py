"""Cross-entropy of every target token, from whole or sharded logits, and sums of it by group.

A token's group is the source of its sample, or a range of positions.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional

from harness.models.exchange import gathered


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy of every token, (micro_batch * seq_len,) in nats and fp32, 0 where
    there is no target.

    logits (micro_batch, seq_len, vocab_size); labels (micro_batch, seq_len), already shifted, -100
    where there is no target. `smoothing`: share of each target's probability that is spread evenly
    over the vocabulary.
    """
    losses = functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=-100,
        reduction="none",
        label_smoothing=smoothing,
    )
    record(losses)
    return losses


@dataclass
class _Recorder:
    sums: torch.Tensor
    """(groups,)"""
    numbers: torch.Tensor
    """Group of each sample, (micro_batch,), or of each token, (micro_batch, seq_len)."""
    has_recorded: bool = False


_recorder: _Recorder | None = None


@contextlib.contextmanager
def recording(sums: torch.Tensor | None, numbers: torch.Tensor | None) -> Iterator[None]:
    """Within this context, `record` adds a micro-batch's losses to `sums` (groups,) by the group
    `numbers` of its samples or tokens. Does nothing if either is None.

    Sums become NaN if the loss does not record its tokens.
    """
    global _recorder
    before, own = _recorder, None
    if sums is not None and numbers is not None:
        own = _Recorder(sums, numbers)
    _recorder = own
    try:
        yield
    finally:
        _recorder = before
    if own is not None and not own.has_recorded:
        own.sums.fill_(math.nan)


def record(losses: torch.Tensor) -> None:
    """Add a micro-batch's token losses, in order, 0 where there is no target. Never waits for the
    device.
    """
    if _recorder is None:
        return
    sums, numbers = _recorder.sums, _recorder.numbers
    own = losses.detach().double().view(len(numbers), -1)
    if numbers.dim() == 1:
        own = own.sum(1)
        places = torch.arange(len(sums), device=sums.device)
        sums.add_(torch.where(numbers[:, None] == places, own[:, None], 0.0).sum(0))
    else:
        sums.index_add_(0, numbers.flatten(), own.flatten())
    _recorder.has_recorded = True


@dataclass(frozen=True)
class Vocabulary:
    """One rank's shard of the vocabulary: ids [first, first + size) of `whole`."""

    first: int
    size: int
    whole: int
    group: dist.ProcessGroup

    def token_losses(
        self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the result of the function `token_losses` on all ranks of the group, none of which
        ever holds all logits. Collective. logits (micro_batch, seq_len, size).
        """
        flat = logits.float().reshape(-1, logits.shape[-1])
        arguments = (flat, labels.reshape(-1), self, smoothing)
        each: torch.Tensor = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
        return each

    def all_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, along the last dimension. Collective."""
        return gathered(logits, -1, self.group)


class _CrossEntropy(Function):
    """Cross-entropy from sums over a sharded vocabulary."""

    @staticmethod
    def forward(
        context: Any, logits: torch.Tensor, labels: torch.Tensor, part: Vocabulary, smoothing: float
    ) -> torch.Tensor:
        """Return the losses (tokens,); logits (tokens, this rank's shard) fp32. Collective."""
        largest = logits.max(-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=part.group)
        powers = (logits - largest[:, None]).exp()
        is_target = labels != -100
        is_here = is_target & (labels >= part.first) & (labels < part.first + part.size)
        column = (labels - part.first).masked_fill(~is_here, 0)
        target = logits.gather(1, column[:, None])[:, 0].masked_fill(~is_here, 0)
        sums = torch.stack([powers.sum(-1), target, logits.sum(-1)])  # (3, tokens)
        dist.all_reduce(sums, group=part.group)
        log_sum = sums[0].log() + largest
        losses = log_sum - (1 - smoothing) * sums[1] - smoothing * sums[2] / part.whole
        probabilities = powers.div_(sums[0][:, None])
        context.save_for_backward(probabilities, column, is_here, is_target)
        context.smoothing, context.whole = smoothing, part.whole
        losses = losses.masked_fill(~is_target, 0)
        record(losses)
        return losses

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the logits; gradient (tokens,). Not collective."""
        probabilities, column, is_here, is_target = context.saved_tensors
        smoothing = context.smoothing
        # Reuses the saved memory: the backward pass runs once.
        slope = probabilities.sub_(smoothing / context.whole) if smoothing else probabilities
        slope.scatter_add_(1, column[:, None], -(1 - smoothing) * is_here[:, None].to(slope.dtype))
        return slope.mul_((is_target * gradient)[:, None]), None, None, None
