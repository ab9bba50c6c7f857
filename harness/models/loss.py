"""The training loss, summed over target tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Sum of the cross-entropy over target tokens, in nats and fp32.

    logits (micro_batch, seq_len, vocab_size); labels (micro_batch, seq_len), already shifted,
    -100 where nothing is to be predicted. The sum, not the mean: micro-batches may hold different
    numbers of targets, and only the caller knows how many the whole global batch has. `smoothing`:
    the share of each target's probability that is spread evenly over the vocabulary.
    """
    return functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=-100,
        reduction="sum",
        label_smoothing=smoothing,
    )


def forward(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model on one micro-batch; all three are (micro_batch, seq_len) int64.

    Returns what `losses` does. No attention mask is passed: every position is a token, and
    transformers reads document boundaries from `position_ids`.
    """
    arguments: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    own: Any = getattr(model, "module", model)
    if getattr(own, "fuses_loss", False) and own.training and not smoothing:
        arguments |= {"shift_labels": labels, "num_items_in_batch": 1}  # the sum, divided by 1
    outputs = model(input_ids=input_ids, use_cache=False, **arguments)
    return losses(own, outputs, labels, smoothing)


def losses(
    model: PreTrainedModel, outputs: Any, labels: torch.Tensor, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The summed token loss of a model's outputs, and the auxiliary loss of a mixture of experts,
    already weighted by the model's own coefficient (None for dense models).
    """
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is not None:
        auxiliary = auxiliary * float(model.config.router_aux_loss_coef)
    if outputs.logits is None:  # models/kernels.py
        return outputs.loss.float(), auxiliary
    return token_losses(outputs.logits, labels, smoothing), auxiliary
