"""Takes DeepSpeed's step, or only the part that counts a skipped one; guard/skip.py says why."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from harness.engine.deepspeed_0_19 import gradients
from harness.errors import ExitCode, RunStopped


def propagate_nonfinite(share: torch.Tensor) -> torch.Tensor:
    """Return the loss; if it is not finite, so are its gradients, and the step is skipped."""
    return share * (1 + 0 * share.detach())


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
