"""The model without stages on one rank, for a pipelined run to be compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.data.batches import Batch
from harness.engine.whole import read_weights
from harness.models.initialize import materialize
from harness.models.loss import forward
from harness.plan import Plan


def unsplit_loss_and_norm(
    plan: Plan,
    empty: PreTrainedModel,
    device: torch.device,
    batches: Iterable[Batch],
    targets: int,
    loss_scale: float,
) -> tuple[float, float]:
    """Loss in nats and gradient norm of a global batch, before the first step and without dropout.

    Gradients are summed in fp32: with the weights in the run's precision that takes
    `bytes_needed` bytes and one micro-batch's activations.
    """
    if plan.run.model.init_from is None:
        model = copy.deepcopy(empty)
        materialize(model, plan.run.train.seed, device)
    else:
        model = read_weights(type(empty), plan, empty, trust_remote_code=False)[0].to(device)
    model.eval()
    sums = {
        parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained(model)
    }
    loss, micro_batches = torch.zeros((), device=device), plan.grad_accum * plan.grid.data
    for batch in batches:
        tensors = (batch.input_ids, batch.labels, batch.position_ids)
        token_loss, auxiliary = forward(model, *(t if t is None else t.to(device) for t in tensors))
        share = token_loss / max(targets, 1)
        loss += share.detach()
        if auxiliary is not None:
            share = share + auxiliary / micro_batches
        (share * loss_scale).backward()
        for parameter, total in sums.items():
            if parameter.grad is not None:
                total += parameter.grad.float() / loss_scale
            parameter.grad = None
    return float(loss), float(torch.nn.utils.get_total_norm(list(sums.values())))


def bytes_needed(empty: PreTrainedModel) -> int:
    """Weights, their gradients, and the fp32 sums of these."""
    return sum(p.numel() * (2 * p.element_size() + 4) for p in trained(empty))


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
