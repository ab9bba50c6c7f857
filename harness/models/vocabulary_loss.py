"""The loss of logits whose vocabulary is sharded: no rank ever holds all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from harness.models.exchange import gathered
from harness.models.loss_breakdown import record


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
        """Return the cross-entropy summed over target tokens, as in models/loss.py; the same on all
        ranks of the group. logits (micro_batch, seq_len, size).
        """
        flat = logits.float().reshape(-1, logits.shape[-1])
        arguments = (flat, labels.reshape(-1), self, smoothing)
        loss: torch.Tensor = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
        return loss

    def all_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, along the last dimension. Collective."""
        return gathered(logits, -1, self.group)


class _CrossEntropy(Function):
    """Cross-entropy from sums over a sharded vocabulary."""

    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        part: Vocabulary,
        smoothing: float,
    ) -> torch.Tensor:
        """Return the summed loss; logits (tokens, this rank's shard) fp32. Collective."""
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
        return losses.sum()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the logits. Not collective."""
        probabilities, column, is_here, is_target = context.saved_tensors
        smoothing = context.smoothing
        # Reuses the saved memory: the backward pass runs once.
        slope = probabilities.sub_(smoothing / context.whole) if smoothing else probabilities
        slope.scatter_add_(1, column[:, None], -(1 - smoothing) * is_here[:, None].to(slope.dtype))
        return slope.mul_(is_target[:, None]).mul_(gradient), None, None, None
