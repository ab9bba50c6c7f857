"""Skips steps: a skipped step's gradients change neither weights nor moments.

DeepSpeed skips steps with gradients that are not finite. Other reasons are combined here, alike on
all ranks; spikes are found by guard/stability.py, which run/step.py asks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from harness.engine.api import SkipRule
from harness.engine.deepspeed_0_19 import gradients
from harness.errors import ExitCode, RunStopped


def propagate_nonfinite(share: torch.Tensor) -> torch.Tensor:
    """Return the same loss, but with gradients that are not finite if the loss is not finite, so
    that the step is skipped without waiting for the host.
    """
    return share * (1 + 0 * share.detach())


def must_skip(
    targets: int, loss_share: torch.Tensor, norm: torch.Tensor, skip_rule: SkipRule | None
) -> bool:
    """Return True if a step must be skipped although its gradients may be finite.

    Without target tokens there is no loss, but weights would decay, moments fade, and routers learn
    from the balancing loss alone.
    """
    return not targets or (skip_rule is not None and skip_rule(loss_share, norm))


def has_nonfinite_grads(engine: Any, norm: float | torch.Tensor) -> bool:
    """Return True if the engine's optimizer would apply a step that is not finite.

    Only for ZeRO-0 in fp32, whose step would put NaN into every weight: there the host waits for
    `norm`. DeepSpeed's other optimizers check their norm themselves.
    """
    return gradients.keeps_no_grad_norm(engine) and not math.isfinite(norm)


def step_or_skip(engine: Any, step: Callable[[], None], skips: bool) -> None:
    """Call `step`; if `skips`, it changes only the engine's counters.

    Raises RunStopped (diverged) if fp16's loss scale is already at its minimum.
    """
    try:
        with gradients.discarding(engine) if skips else contextlib.nullcontext():
            step()
    except Exception as error:
        if not gradients.is_minimum_loss_scale(error):
            raise
        with gradients.discarding(engine):
            step()  # complete the interrupted step
        raise RunStopped(ExitCode.DIVERGED, _diagnosis(engine)) from error
    finally:
        gradients.drop_skipped_gradients(engine)


def _diagnosis(engine: Any) -> str:
    minimum = engine.config["fp16"].get("min_loss_scale", 1)
    return (
        f"the fp16 loss scale fell to its minimum ({minimum}) and the gradients still overflow: "
        f"{engine.skipped_steps} steps were skipped. The model has diverged: lower optim.lr or "
        "raise optim.warmup_steps, or train in bf16"
    )
