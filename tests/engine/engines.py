"""Engines of the small model and their batches, for functions on ranks (tests/ranks.py)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.layout.world import World
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from harness.plan import memory
from harness.plan.make import make_plan
from harness.plan.memory import Untraceable
from harness.plan.plan import Plan
from tests.engine.small import MODEL, SEQ_LEN, run_config
from tests.tiers import rest_in_gate

WORLD = World.from_environ()
STAGES = (0, 1, 2, 3)
# ZeRO 3 that really partitions: no parameter is small enough to stay whole.
SPLIT = {"stage3_param_persistence_threshold": 0}
SGD = {"name": "sgd", "lr": 1.0, "weight_decay": 0.0}


cells = functools.partial(rest_in_gate, "engine")


def drawn_weights(config: dict[str, Any] = MODEL) -> dict[str, torch.Tensor]:
    """Return the initial weights of a model, drawn by a single process."""
    model = skeleton(hf_config(config), torch.float32)
    materialize(model, 0, torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def given_weights() -> dict[str, torch.Tensor]:
    """Return weights of MODEL that no seed produces."""
    return {name: tensor + 0.125 for name, tensor in drawn_weights().items()}


def different(
    weights: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the names of weights that are missing, unexpected or not bit-equal."""
    own = dict(weights)  # collective
    missing = own.keys() ^ expected.keys()
    return sorted(
        missing | {n for n in own.keys() - missing if not torch.equal(own[n], expected[n])}
    )


@functools.cache
def folder() -> Path:
    """Return the ranks' working folder, with the model's config and two sets of weights.

    Collective.
    """
    if WORLD.rank == 0:
        Path("config.json").write_text(json.dumps(MODEL))
        given = given_weights()
        incomplete = {n: t for n, t in given.items() if "layers.1.mlp.up" not in n}
        for name, weights in (("given", given), ("incomplete", incomplete)):
            Path(name).mkdir()
            Path(name, "config.json").write_text(json.dumps(MODEL))
            save_file(weights, Path(name, "model.safetensors"), metadata={"format": "pt"})
    dist.barrier()
    return Path.cwd()


def written(name: str, config: dict[str, Any]) -> str:
    """Write the config.json of a model for this rank, and return its path."""
    path = folder() / f"{name}.rank-{WORLD.rank}.json"
    path.write_text(json.dumps(config))
    return str(path)


def gathered(value: Any) -> list[Any]:
    """Return each rank's value, on every rank. Collective."""
    values = [None] * WORLD.world_size
    dist.all_gather_object(values, value)
    return values


def plan_of(config: dict[str, Any], ds: dict[str, Any], world: World = WORLD) -> Plan:
    """Return the plan of a run config. Models of unknown families get no estimate: their trace
    takes a process and seconds.
    """
    with mock.patch.object(memory, "traced", side_effect=Untraceable):
        return make_plan(RunConfig.model_validate(config), ds, world)


def engine_of(ds: dict[str, Any], **sections: dict[str, Any]) -> Any:
    """Build an engine of the small model; `sections` change the run config. Collective."""
    from tests.gates.engines import build_engine  # imports DeepSpeed

    return build_engine(plan_of(run_config(folder(), **sections), ds), torch.device("cpu"))


def stage(number: int) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a ZeRO stage."""
    return {"zero_optimization": {"stage": number, **(SPLIT if number == 3 else {})}}


def pipeline(zero: int = 1, **json_keys: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON of two pipeline stages."""
    return {"zero_optimization": {"stage": zero}, "pipeline": {"stages": 2}, **json_keys}


def fp16(**knobs: float) -> dict[str, Any]:
    """Return a DeepSpeed JSON whose loss scale overflows and is halved in the first step."""
    settings = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1, **knobs}
    return {"zero_optimization": {"stage": 1}, "fp16": settings}


def all_batches(step: int = 0) -> list[Batch]:
    """Return the four micro-batches of two samples that all ranks together train on."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 24, (8, SEQ_LEN + 1), generator=generator)
    rows = ids.split(2)
    return [Batch(r[:, :-1].contiguous(), r[:, 1:].clone(), None) for r in rows]


def batches(step: int = 0) -> tuple[list[Batch], int]:
    """Return this rank's two micro-batches if every rank is a data rank, and the total number of
    targets.
    """
    return all_batches(step)[WORLD.rank :: WORLD.world_size], 8 * SEQ_LEN


def share_of(engine: Any, step: int = 0) -> tuple[list[Batch], int]:
    """Return the micro-batches of this rank's data rank, and the total number of targets."""
    grid = engine.plan.grid
    return all_batches(step)[grid.coords(WORLD.rank).data :: grid.data], 8 * SEQ_LEN


def losses(engine: Any, steps: int, lr: float = 3e-3) -> list[float]:
    """Return each step's mean loss; the batch is always the same, so that the loss falls.
    Collective.
    """
    means = []
    for _ in range(steps):
        result = engine.train_batch(*share_of(engine), lr)
        means.append(float(engine.sum_over_ranks(result.loss_share.clone())))
    return means


def losses_and_norms(engine: Any) -> list[list[float]]:
    """Return loss and gradient norm of three steps, and close the engine. Collective."""
    pairs = []
    for number in range(3):
        result = engine.train_batch(*share_of(engine, number), 0.1)
        loss = engine.sum_over_ranks(result.loss_share.clone())
        pairs.append([float(loss), float(result.grad_norm)])
    engine.close()
    return pairs
