"""Decides that a step is skipped: its gradients then change neither weights nor moments.

DeepSpeed skips steps whose gradients are not finite; the rest is decided here, alike on all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from harness.engine.api import Judge
from harness.engine.deepspeed_0_19 import gradients
from harness.errors import ExitCode, RunStopped


def poisoned(share: torch.Tensor) -> torch.Tensor:
    """The same loss; where it is not finite, its gradients are not either, so that the step is
    skipped. The host need not know.
    """
    return share * (1 + 0 * share.detach())


def is_unwanted(
    targets: int, loss_share: torch.Tensor, norm: torch.Tensor, is_spike: Judge | None
) -> bool:
    """Return whether a step is skipped although its gradients may be finite.

    Without a target there is no loss: weights would decay, moments fade, and routers learn from the
    balancing loss alone.
    """
    return not targets or (is_spike is not None and is_spike(loss_share, norm))


def is_spoiled(engine: Any, norm: float | torch.Tensor) -> bool:
    """Return whether the engine's optimizer would take a step that is not finite.

    The host waits for `norm` there: applied, NaN would be in every weight. The other optimizers of
    DeepSpeed read their norm themselves.
    """
    return gradients.keeps_no_grad_norm(engine) and not math.isfinite(norm)


def step_or_skip(engine: Any, step: Callable[[], None], skips: bool) -> None:
    """Call `step`, which changes nothing but the engine's counts if it `skips`.

    Raises RunStopped (diverged) when fp16's loss scale cannot fall any further.
    """
    try:
        with gradients.discarding(engine) if skips else contextlib.nullcontext():
            step()
    except Exception as error:
        if not gradients.is_minimum_loss_scale(error):
            raise
        with gradients.discarding(engine):
            step()  # which was left half done
        raise RunStopped(ExitCode.DIVERGED, _diagnosis(engine)) from error
    finally:
        gradients.drop_skipped_gradients(engine)


def _diagnosis(engine: Any) -> str:
    least = engine.config["fp16"].get("min_loss_scale", 1)
    return (
        f"the fp16 loss scale fell to its minimum ({least}) and the gradients still overflow: "
        f"{engine.skipped_steps} steps were skipped. The model has diverged: lower optim.lr or "
        "raise optim.warmup_steps, or train in bf16"
    )
