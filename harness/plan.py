"""The Plan: run config + DeepSpeed JSON + world, checked against each other and made whole.

No torch, no transformers, no deepspeed: a plan is made on a laptop in a fraction of a second, and
every mistake of both files is in one report.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from harness.config import RunConfig
from harness.curriculum import Curriculum
from harness.ds_adopt import adopt
from harness.ds_check import check_keys
from harness.ds_config import Source, changes, literal, normalized, refusals, value_of
from harness.ds_resolve import (
    Precision,
    fill_in,
    fill_in_swap_folder,
    overrides,
    resolve_precision,
    secondary_problems,
)
from harness.errors import ConfigError
from harness.estimate import estimate
from harness.lr_and_batch import Batch, Schedule
from harness.plan_curriculum import curriculum_notes, curriculum_of, curriculum_problems
from harness.plan_folder import run_dir_problems
from harness.plan_kernels import kernel_notes, kernel_problems
from harness.plan_model import attention_problems, expert_problems, find_model
from harness.plan_optimizer import optimizer_problems, rate_notes
from harness.plan_pipeline import by_memory, notes, num_stages, stage_bounds
from harness.plan_text import describe
from harness.planning.grid import Grid
from harness.planning.memory.timeline import Estimate
from harness.planning.shape import Shape
from harness.planning.world import World

Event = dict[str, Any]

UNNAMED = Source("DeepSpeed JSON")
NOT_TRAINED = "not_trained"
"""Kind of the event that says why train.py would refuse a plan made for its estimate."""
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a device is touched."""

    run: RunConfig
    """The run config, with what was adopted from the JSON."""
    deepspeed: dict[str, Any]
    """The resolved JSON, handed unchanged to zero.Init and deepspeed.initialize."""
    deepspeed_given: dict[str, Any]
    """The JSON as the user gave it."""
    deepspeed_source: str
    world: World
    grid: Grid
    model_config: dict[str, Any]
    """Hugging Face config, with model.overrides and model.dropout applied."""
    model_source: str
    """"preset NAME", or the path or hub id the config came from."""
    shape: Shape | None
    """None for an architecture that the planner does not know."""
    precision: Precision
    zero_stage: int
    global_batch: int
    """Samples per optimizer step over all ranks."""
    micro_batch: int
    """Samples that a rank takes at once."""
    grad_accum: int
    """Micro-batches per optimizer step."""
    stages: tuple[int, ...] | None = None
    """Bounds of the pipeline stages over the model's units (planning/stages.py); None without."""
    events: tuple[Event, ...] = ()

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None under train.epochs, until the data is counted."""
        return self.run.train.num_steps(self.curriculum, self.run.data.seq_len)

    @cached_property
    def curriculum(self) -> Curriculum:
        """How large the steps' batches are, and how long their sequences."""
        return curriculum_of(self.run)

    @cached_property
    def estimate(self) -> Estimate | None:
        """The memory it comes to; None for an architecture that the planner does not know."""
        return estimate(self)

    def schedule(self, total_steps: int) -> Schedule:
        """The learning rate over a run of `total_steps` optimizer steps."""
        optim = self.run.optim
        return Schedule(
            optim.schedule,
            optim.lr,
            total_steps,
            warmup_steps=optim.warmup_steps,
            warmup_type=optim.warmup_type,
            min_lr_ratio=optim.min_lr_ratio,
            decay_fraction=optim.decay_fraction,
            power=optim.power,
            cycles=optim.cycles,
            cycle_growth=optim.cycle_growth,
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, for plan.json."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "shape"},
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "run": self.run.model_dump(mode="json"),
            "run_set": self.run.origins(),
            "world": asdict(self.world),
            "grid": {**asdict(self.grid), "data": self.grid.data},
            "steps": self.steps,
            "events": list(self.events),
        }

    def describe(self) -> str:
        """The plan as text, for people."""
        return describe(self)


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
    return by_memory(plan)


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
