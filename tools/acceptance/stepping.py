"""One rank that takes AdamW steps by every implementation here: `... stepping OUT ELEMENTS`.

The truth is torch's AdamW in fp64, an operation at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.config.run_config import RunConfig
from harness.engine.processes import ending_together, join
from harness.layout.world import World
from harness.plan.make import make_plan

_STEPS = 3
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def main(argv: list[str]) -> int:
    """Write {implementation: the largest difference of a weight, or why it is not here}."""
    out, elements = argv
    world = World.from_environ()
    with ending_together():
        device = join(world)
        results: dict[str, Any] = {"engine": _of_the_engine(world, device), "apart": {}}
        expected = _stepped(_torchs(), int(elements), device, torch.float64)
        for name, make in _implementations(device).items():
            try:
                weights = _stepped(make(), int(elements), device, torch.float32)
                results["apart"][name] = float((weights.double() - expected).abs().max())
            except Exception as error:  # whatever a build raises
                results["apart"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
        Path(out).write_text(json.dumps(results))
    return 0


def _of_the_engine(world: World, device: torch.device) -> str:
    """Return the class of the optimizer that a run of zero1.json has here."""
    from tests.gates.engines import build_engine

    run = RunConfig.model_validate(
        {"data": {"seq_len": 32}, "train": {"global_batch": 1, "steps": 2}}
        | {"optim": {"warmup_steps": 0}}
    )
    plan = make_plan(run, {"zero_optimization": {"stage": 1}}, world)
    engine = build_engine(plan, device)
    name = str(engine.describe()["inner_optimizer"])
    engine.close()
    return name


Make = Callable[[torch.Tensor], torch.optim.Optimizer]


def _torchs(**how: bool) -> Make:
    return lambda weight: torch.optim.AdamW([weight], **_SETTINGS, **how)


def _implementations(device: torch.device) -> dict[str, Callable[[], Make]]:
    def deepspeeds() -> Make:
        if device.type == "cuda":
            from deepspeed.ops.adam import FusedAdam as Compiled
        else:
            from deepspeed.ops.adam import DeepSpeedCPUAdam as Compiled
        return lambda weight: Compiled([weight], **_SETTINGS)

    return {
        "torch's, fused": lambda: _torchs(fused=True),
        "torch's, foreach": lambda: _torchs(foreach=True),
        "DeepSpeed's, compiled": deepspeeds,
    }


def _stepped(make: Make, elements: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.rand(elements, generator=generator).to(device, dtype))
    optimizer = make(weight)
    for _ in range(_STEPS):
        weight.grad = torch.randn(elements, generator=generator).to(device, dtype)
        optimizer.step()
    return weight.detach()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
