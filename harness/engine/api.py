"""The engine's interface, for everybody outside this room; imports no deepspeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Judge = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. Tensors stay on the device: reading them is the caller's sync.

    `loss_share`: this rank's part of the loss; the sum over data ranks is the mean over the target
    tokens of the global batch. `grad_norm`: before clipping, over all ranks.
    """

    loss_share: torch.Tensor
    grad_norm: float | torch.Tensor
