"""One rank of a run with a planted fault: the fault as JSON, or null, then train.py's arguments."""

import json
import os
import signal
import sys
import time
from typing import Any
from unittest import mock

import torch

from harness import loop, train
from harness.run.run import Run
from harness.steps import Step

_MORE_THAN_ANY = 2**50  # bytes


def main(argv: list[str]) -> int:
    """Plant the fault and train."""
    fault, *arguments = argv
    if planted := json.loads(fault):
        plant(planted)
    return train.main(arguments)


def plant(fault: dict[str, Any]) -> None:
    """Plant a fault into one step of one rank: {"rank": 1, "step": 3, "do": "raise"}.

    `do`: raise, sleep (an hour), usr1, oom, nan (the loss), spike (a loss 10,000 times as large).
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

    def scaled(compute: Any) -> Any:
        def with_factor(*tensors: Any, **more: Any) -> Any:
            loss, auxiliary = compute(*tensors, **more)
            return loss * factor, auxiliary

        return with_factor

    with (
        mock.patch.object(passes, "forward", scaled(passes.forward)),
        mock.patch.object(pipeline, "losses", scaled(pipeline.losses)),
    ):
        return take_step(run, step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
