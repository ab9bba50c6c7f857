"""Faults that an acceptance plants into a run, on one of its ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import torch

from harness import loop
from harness.run.run import Run
from harness.steps import Step

_MORE_THAN_ANY = 2**50  # bytes


def plant(fault: dict[str, Any]) -> None:
    """Let a rank do something in one of its steps: {"rank": 1, "step": 3, "do": "raise"}.

    `do`: raise, sleep (for ever), usr1, oom (ask for more memory than there is), nan (a loss that
    is no number), spike (a loss 10,000 times too large).
    """
    take_step, factors = loop.take_step, {"nan": float("nan"), "spike": 1e4}

    def faulty(run: Run, step: Step) -> Any:
        if run.plan.world.rank != fault["rank"] or step.number != fault["step"]:
            return take_step(run, step)
        match fault["do"]:
            case "raise":
                raise RuntimeError("a failure that the acceptance planted")
            case "sleep":
                time.sleep(3600)
            case "usr1":
                os.kill(os.getpid(), signal.SIGUSR1)
            case "oom":
                torch.empty(_MORE_THAN_ANY, dtype=torch.uint8, device=run.engine.device)
        return take_scaled_step(run, step, take_step, factors.pop(fault["do"], 1.0))

    loop.take_step = faulty


def take_scaled_step(run: Run, step: Step, take_step: Any, factor: float) -> Any:
    """Take a step whose losses on this rank are `factor` times as large."""
    from harness.engine import forward as passes  # DeepSpeed, once the device is known
    from harness.engine import pipeline

    forward, losses = passes.forward, pipeline.losses

    def scaled(*tensors: Any, **more: Any) -> Any:
        loss, auxiliary = forward(*tensors, **more)
        return loss * factor, auxiliary

    def scaled_losses(*tensors: Any, **more: Any) -> Any:
        loss, auxiliary = losses(*tensors, **more)
        return loss * factor, auxiliary

    with (
        mock.patch.object(passes, "forward", scaled),
        mock.patch.object(pipeline, "losses", scaled_losses),
    ):
        return take_step(run, step)
