"""Steps that go wrong, planted into a run: what tests/faults/plant.py does with "spoil"."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from harness import loop
from harness.run.run import Run
from harness.steps import Step
from tools.acceptance.plant import take_scaled_step


def spoil(spoils: dict[str, Any]) -> None:
    """`loss`: {first sample of a step: factor of its loss, on the last rank alone}; `flip`: step
    after which the last rank's `weight`, by name, or its last one, has one bit flipped; `ruin`:
    step after which that last one is no number; `nan`: how many steps this process takes until a
    loss is none, on the last rank alone.
    """
    steps = itertools.count(1)
    take_step = loop.take_step

    def spoiled(run: Run, step: Step) -> Any:
        last = run.plan.world.rank == run.plan.world.world_size - 1
        factor = (
            float(spoils.get("loss", {}).get(str(step.reads.first_sample), 1.0)) if last else 1.0
        )
        if next(steps) == spoils.get("nan") and last:
            factor = float("nan")
        result = take_scaled_step(run, step, take_step, factor)
        if last and step.number == spoils.get("flip"):
            weights = {replica.name: replica.tensor for replica in run.engine.replicated()}
            weights |= {name: weight for name, weight, _ in run.engine.tied()}
            weight = weights[spoils.get("weight", [*weights][-1])]
            weight.view(-1).view(torch.int32)[-1] ^= 1
        if step.number == spoils.get("ruin"):
            *_, weight = run.engine.module.parameters()
            weight.data.fill_(float("nan"))
        return result

    loop.take_step = spoiled
