"""Engines of the small model and their batches, for functions on ranks (tests/ranks.py)."""

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
from harness.plan import memory
from harness.plan.make import make_plan
from harness.plan.memory import Untraceable
from harness.plan.plan import Plan
from tests.engine.small import MODEL, SEQ_LEN, run_config
from tests.models.small import built
from tests.ranks import after_calls
from tests.tables import beside
from tests.tiers import rest_in_gate

WORLD = World.from_environ()
STAGES = (0, 1, 2, 3)
SGD = {"name": "sgd", "lr": 1.0, "weight_decay": 0.0}
cells = functools.partial(rest_in_gate, "engine")
_open: list[Any] = []


def drawn_weights(config: dict[str, Any] = MODEL) -> dict[str, torch.Tensor]:
    """Return the initial weights of a model, drawn by a single process."""
    return {name: parameter.detach() for name, parameter in built(config).named_parameters()}


def given_weights() -> dict[str, torch.Tensor]:
    """Return weights of MODEL that no seed produces."""
    return {name: tensor + 0.125 for name, tensor in drawn_weights().items()}


def different(
    weights: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the names of weights that are missing, unexpected or not bit-equal."""
    own = dict(weights)  # collective
    lost = own.keys() ^ expected.keys()
    return sorted(lost | {n for n in own.keys() - lost if not torch.equal(own[n], expected[n])})


@functools.cache
def folder() -> Path:
    """Return the ranks' working folder, with the model's config and weights. Collective."""
    if WORLD.rank == 0:
        Path("config.json").write_text(json.dumps(MODEL))
        Path("given").mkdir()
        Path("given", "config.json").write_text(json.dumps(MODEL))
        save_file(given_weights(), Path("given", "model.safetensors"), metadata={"format": "pt"})
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
    """Return the plan of a run config; unknown families get no estimate, which takes seconds."""
    with mock.patch.object(memory, "traced", side_effect=Untraceable):
        return make_plan(RunConfig.model_validate(config), ds, world)


_TABLES = beside(__file__, "layouts.toml")
TESTED: dict[str, list[str]] = _TABLES["tested"]


def layout(words: str, **json_keys: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a layout in words, such as "zero3 bf16 offload"."""
    first, *others = words.split()
    zero: dict[str, Any] = {"stage": int(first.removeprefix("zero"))}
    if zero["stage"] == 3:  # really partitions: no parameter is small enough to stay whole
        zero["stage3_param_persistence_threshold"] = 0
    ds: dict[str, Any] = {"zero_optimization": zero}
    for word in others:
        zero |= _TABLES["zero"].get(word, {})
        ds |= {} if word in _TABLES["zero"] else _TABLES["keys"][word]
    return {**ds, **json_keys}


def engine_of(ds: str | dict[str, Any], padded: bool = False, **sections: dict[str, Any]) -> Any:
    """Build an engine of the small model in a layout, given as a JSON or in words; `sections`
    change the run config. It is closed when the test ends, if not before. Collective.
    """
    from tests.gates.engines import build_engine  # imports DeepSpeed

    json = layout(ds) if isinstance(ds, str) else ds
    plan = plan_of(run_config(folder(), **sections), json)
    engine = build_engine(plan, torch.device("cpu"), padded=padded)
    close = engine.close

    def closed() -> None:
        if engine in _open:
            _open.remove(engine)
        close()

    engine.close = closed
    _open.append(engine)
    return engine


def close_engines() -> None:
    """Close the engines that a test left open, the last one first."""
    for engine in [*reversed(_open)]:
        engine.close()


after_calls.append(close_engines)


def fp16(words: str = "zero1", **knobs: float) -> dict[str, Any]:
    """Return a layout whose loss scale overflows and is halved in the first step."""
    settings = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1, **knobs}
    return layout(words, fp16=settings)


def all_batches(step: int = 0) -> list[Batch]:
    """Return the four micro-batches of two samples that all ranks together train on."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 24, (8, SEQ_LEN + 1), generator=draw)
    return [Batch(r[:, :-1].contiguous(), r[:, 1:].clone(), None) for r in ids.split(2)]


def share_of(engine: Any, step: int = 0) -> tuple[list[Batch], int]:
    """Return the micro-batches of this rank's data rank, and the total number of targets."""
    grid = engine.plan.grid
    return all_batches(step)[grid.coords(WORLD.rank).data :: grid.data], 8 * SEQ_LEN


def losses(engine: Any, steps: int, lr: float = 3e-3) -> list[float]:
    """Return each step's mean loss on the same batch, so that it falls. Collective."""
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
