"""Gradients of weights that all tensor-parallel ranks have: they must be the same on all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from harness.engine.fragments import local_gradients
from harness.engine.parts import part_of
from harness.guard.replicas import largest_difference


def gradients_apart(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Return by how much the gradients of undivided parameters differ over the ranks of `group`, of
    the largest element; NaN where one is not finite. Collective.

    They differ where a plan to divide tensors forgets that a rank computes only a part of one.
    Valid between the last backward of a step and the step itself.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    apart = {}
    for parameter, gradient in local_gradients(module):
        if not part_of(parameter).is_whole or not gradient.numel():
            continue
        apart[names[id(parameter)]] = largest_difference(gradient, group, device)
    return apart
