"""Makes the Plan: run config + DeepSpeed JSON + world, checked against each other and made whole.

No torch, no transformers, no deepspeed: a plan is made on a laptop in a fraction of a second, and
every mistake of both files is in one report.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config.curriculum import Curriculum
from harness.config.ds_check import check_keys
from harness.config.ds_json import Source, changes, literal, normalized, refusals, value_of
from harness.config.lr_and_batch import Batch
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.grid import Grid
from harness.layout.world import World
from harness.plan.adopt import adopt
from harness.plan.curriculum import curriculum_notes, curriculum_of, curriculum_problems
from harness.plan.folder import run_dir_problems
from harness.plan.kernels import kernel_notes, kernel_problems
from harness.plan.memory import estimate
from harness.plan.model import attention_problems, expert_problems, find_model
from harness.plan.optimizer import optimizer_problems, rate_notes
from harness.plan.pipeline import by_memory, notes, num_stages, stage_bounds
from harness.plan.plan import NOT_TRAINED, Event, Plan
from harness.plan.resolve import (
    Precision,
    fill_in,
    fill_in_swap_folder,
    overrides,
    resolve_precision,
    secondary_problems,
)

UNNAMED = Source("DeepSpeed JSON")
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def make_plan(
    run: RunConfig,
    ds_json: Mapping[str, Any],
    world: World,
    *,
    ds_source: Source = UNNAMED,
    estimating: bool = False,
) -> Plan:
    """Check the two configs against each other, the model and the world, and resolve the JSON.

    `estimating`: the plan is for its memory alone; a layout that is counted but not trained is then
    an event. Raises one ConfigError with every problem.
    """
    ds, precision, events, problems = check_json(ds_json, world, ds_source, estimating)
    given = copy.deepcopy(ds)
    grid = _grid(ds, world, ds_source, problems)
    run, adopted, wrong = adopt(ds, run, grid.data, ds_source)
    events += adopted
    problems += wrong
    wrong = [*curriculum_problems(run)]
    curriculum = Curriculum(run.train.global_batch) if wrong else curriculum_of(run)
    problems += wrong
    batch = None
    # A value of the wrong type is reported already: the default in its place is nobody's wish.
    if all((key in ds) == (key in ds_json) for key in _BATCH_KEYS):
        batch = _batch(ds, run, grid.data, curriculum.quantum, problems)
    problems += attention_problems(run, world)
    problems += run.profile.problems(run.train.num_steps(curriculum, run.data.seq_len))
    problems += optimizer_problems(run, ds, ds_source)
    problems += run_dir_problems(run)
    model = find_model(run)
    run, config, shape = model.run, model.config, model.shape
    events += model.events
    problems += model.problems
    problems += expert_problems(config, precision, run.model.name)
    problems += kernel_problems(run, config.get("model_type"), num_stages(ds), world)
    stages, wrong = stage_bounds(ds, run, config, shape, ds_source)
    problems += wrong
    if problems or batch is None:
        raise ConfigError(problems)
    events += [*notes(ds, shape, batch.grad_accum), *kernel_notes(run)]
    events += curriculum_notes(run, curriculum)
    events += rate_notes(run, run.train.num_steps(curriculum, run.data.seq_len))
    hidden_sizes = (config[key] for key in ("hidden_size", "n_embd", "d_model") if key in config)
    fill_in(ds, run, batch, world, grid, next(hidden_sizes, None))
    plan = Plan(
        run=run,
        deepspeed=ds,
        deepspeed_given=copy.deepcopy(dict(ds_json)),
        deepspeed_source=ds_source.name,
        world=world,
        grid=grid,
        model_config=config,
        model_source=model.source,
        shape=shape,
        precision=precision,
        zero_stage=value_of(ds, "zero_optimization.stage"),
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        grad_accum=batch.grad_accum,
        stages=stages,
        events=(*events, *overrides(given, ds)),
    )
    plan = by_memory(plan)
    return replace(plan, estimate=estimate(plan))


_DIVIDED = ("train.global_batch", "train.micro_batch", "ramp.batch_from", "ramp.batch_step")


def _batch(
    ds: Mapping[str, Any], run: RunConfig, data_ranks: int, quantum: int, problems: list[str]
) -> Batch | None:
    """How a step's samples are divided; None, and why, where they cannot be."""
    accum = literal(ds, "gradient_accumulation_steps")
    whole, micro = run.train.global_batch, run.train.micro_batch
    try:
        return Batch.divided(whole, data_ranks, micro, accum, quantum)
    except ValueError as error:
        said = [f"{key}: {run.origin(key)}" for key in _DIVIDED if key in str(error)]
        problems.append(f"{error} ({', '.join(said)})")
        return None


def check_json(
    ds_json: Mapping[str, Any], world: World, source: Source, estimating: bool = False
) -> tuple[dict[str, Any], Precision, list[Event], list[str]]:
    """What can be said of the JSON alone.

    Returns what is right of it with its precision decided, that precision, events and problems.
    """
    ds: dict[str, Any] = normalized(ds_json)
    check = check_keys(ds, source)
    precision, events, problems = resolve_precision(ds, world, source)
    fill_in_swap_folder(ds)
    problems += secondary_problems(ds, world, source)
    events = [*check.events(), *events]
    events += changes(ds, source, world.accelerator, check.wrong_keys)
    for problem, estimated in refusals(ds, source, world.accelerator, check.wrong_keys):
        if estimated and estimating:
            events.append({"kind": NOT_TRAINED, "message": problem})
        else:
            problems.append(problem)
    return ds, precision, events, [*check.problems, *problems]


def _grid(ds: Mapping[str, Any], world: World, source: Source, problems: list[str]) -> Grid:
    """How the ranks are split; the plain data-parallel grid where that does not divide."""
    tensor, sequence = "tensor_parallel.autotp_size", "sequence_parallel_size"
    sizes = {key: max(1, value_of(ds, key)) for key in (tensor, sequence)}  # 0 means off
    sizes["pipeline.stages"] = stages = num_stages(ds)
    try:
        return Grid(world.world_size, stages, tensor=sizes[tensor], sequence=sizes[sequence])
    except ValueError as error:
        said = [f"{key}: {source.of(key)}" for key, size in sizes.items() if size > 1]
        problems.append(f"{error} ({', '.join(said)})")
        return Grid(world.world_size)
