"""The engine's interface for all other packages; does not import deepspeed.

`build.build_engine` returns a ZeroEngine, or a PipelineEngine if the JSON has pipeline stages. What
others use of it, with its docstrings in zero.py:

    plan, device, module        what trains, and where
    train_batch, eval_batch     a step; the held-out loss
    next_token_logits           a sample
    step_applied, skipped_steps, loss_scale, sum_over_ranks
    expert_tokens, count_sources, source_losses
    fragments, scalars          what a checkpoint saves
    restore, refresh_weights, restore_scalars
    replicated, tied            weights that ranks should hold alike
    accumulate, gradients, gradients_apart, apply, undivided: the check of the first batch
    group_of, describe, events, write_monitors, close
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.layout.box import Part

if TYPE_CHECKING:
    from harness.engine.zero import ZeroEngine as Engine
else:
    Engine = Any

# Fill(name, kind, offset, out, part): read elements [offset, offset + numel) of a slice into the
# flat tensor `out`, in place.
Fill = Callable[[str, str, int, torch.Tensor, Part], None]
# Kinds(name): the kinds of optimizer state that were saved for a parameter.
Kinds = Callable[[str], Collection[str]]
# Plain numbers by section: "counters", "loss_scaling", "optimizer".
Scalars = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Tensors stay on the device; reading one waits for it.

    `loss_share`: this rank's part of the loss; summed over the data-parallel ranks it is the mean
    over the target tokens of the global batch. `grad_norm`: before clipping, over all ranks.
    """

    loss_share: torch.Tensor
    grad_norm: float | torch.Tensor


@dataclass(frozen=True)
class Replica:
    """Elements of a weight that other ranks of the stage should hold bit for bit."""

    name: str
    tensor: torch.Tensor
    ranks: tuple[int, ...]
    """The ranks that hold these elements, including this one, ascending."""
    group: dist.ProcessGroup | None
    """Group of the tensor-parallel ranks among them, each of which computes the gradient itself."""
