"""Why a step is skipped: its gradients then change neither weights nor moments.

A Cause says who decides; `why_skipped` names the cause afterwards.
"""

import math
from collections.abc import Callable
from enum import Enum

import torch

from harness.guard.stability import Spike

# SkipRule(loss_share, grad_norm): True to skip the step. All ranks must decide alike.
SkipRule = Callable[[torch.Tensor, torch.Tensor], bool]


class Cause(Enum):
    """The cause of a skipped step, and who finds it."""

    NO_TARGETS = "none of its samples has a target token"
    """The engine, from the batch (engine/zero.py)."""
    SPIKE = "a spike of "
    """The run's SkipRule (run/step.py), where guard.spikes is skip or rollback."""
    OVERFLOW = "fp16 overflowed: the loss scale is reduced"
    """DeepSpeed's dynamic loss scale, which recovers or reaches its minimum; that stops the run."""
    NOT_FINITE = "the gradients are not finite"
    """DeepSpeed, or the engine where DeepSpeed does not look (engine/stepping.py)."""

    @property
    def is_bad(self) -> bool:
        """True if too many such steps in a row are divergence (guard.max_bad_steps)."""
        return self in (Cause.SPIKE, Cause.NOT_FINITE)


def why_skipped(spike: Spike | None, loss: float, is_scaled: bool) -> tuple[Cause, str]:
    """Return the cause of a skipped step with targets, and its text.

    `loss`: over all ranks; `is_scaled`: fp16 with a dynamic loss scale.
    """
    if spike is not None:
        return Cause.SPIKE, f"{Cause.SPIKE.value}{spike.quantity}"
    cause = Cause.OVERFLOW if is_scaled else Cause.NOT_FINITE
    return cause, cause.value if math.isfinite(loss) else "the loss is not finite"
