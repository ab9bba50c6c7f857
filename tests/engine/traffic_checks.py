"""Checks of what a step sends, on two ranks: every collective that torch is asked for."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.estimate import traffic
from harness.estimate.inputs import Inputs
from harness.plan.memory import memory_inputs
from tests.engine.rank import OUT, WORLD, engine_of, losses, run_checks, share_of, stage
from tests.engine.small import MIXTURES

SMALL = 16  # bytes: norms and the like


class Collectives(TorchDispatchMode):
    """Adds up the bytes of collectives over several ranks, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            groups = [a for a in args if isinstance(a, torch.ScriptObject)]
            ranks = max((dist.ProcessGroup.unbox(g).size() for g in groups[:1]), default=1)
            size = _bytes(args[1 if name in ("alltoall_base_", "_reduce_scatter_base_") else 0])
            if ranks > 1 and size > SMALL:
                self.bytes[name] += size
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    if torch.is_tensor(tensors):
        return int(tensors.nbytes)
    return sum(map(_bytes, tensors))


Formulas = tuple[Callable[[Inputs], traffic.Calls], ...]


def _step(ds: dict[str, Any], family: str | None = None) -> tuple[dict[str, int], Inputs]:
    """Return the second step's bytes and the plan's numbers: the first one sends shapes, too."""
    model = {}
    if family:
        path = OUT / f"traffic-{family}.{WORLD.rank}.json"
        path.write_text(json.dumps(MIXTURES[family]))
        model["name"] = str(path)
    engine = engine_of(ds, model=model)
    losses(engine, 1)
    with Collectives() as seen:
        engine.train_batch(*share_of(engine), 1e-3)
    inputs = memory_inputs(engine.plan)
    assert inputs is not None
    stage_of = engine.plan.grid.coords(WORLD.rank).pipeline
    engine.close()
    return dict(seen.bytes), inputs.of_stage(stage_of)


def step_traffic() -> dict[str, Any]:
    """Bytes of a step by the kind of collective, and by formula, in each layout."""
    results: dict[str, Any] = {}
    axes: dict[str, dict[str, Any]] = {
        "tensor": {"tensor_parallel": {"autotp_size": 2}},
        "sequence": {"sequence_parallel_size": 2},
        "expert": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        "pipeline": {"pipeline": {"stages": 2}},
    }
    of_micro_batch = {
        "tensor": (traffic.tensor, traffic.losses),
        "sequence": (traffic.sequence,),
        "expert": (traffic.expert, traffic.expert_counts),
        "pipeline": (traffic.boundary,),
    }
    ways = {f"zero{n}": stage(n) for n in range(4)}
    ways |= {axis: {**stage(1), **keys} for axis, keys in axes.items()}
    for name, ds in ways.items():
        seen, inputs = _step(ds, "mixtral" if name == "expert" else None)
        results[name] = {
            "seen": seen,
            "axis": inputs.grad_accum
            * sum(formula(inputs).total for formula in of_micro_batch.get(name, ())),
            "gradients": traffic.gradients(inputs).total,
            "weights": traffic.weights(inputs).total,
        }
    return results


CHECKS = (step_traffic,)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
