"""Whether an optimizer works in the layout that the JSON asks for, and which comes nearest."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.ds_json import Source, offloaded_to, value_of
from harness.config.run_config import RunConfig
from harness.layout.optimizers import OPTIMIZERS, GroupRule
from harness.layout.shape import Shape

_SETTINGS = ("betas", "eps", "momentum")
_OF_SCHEDULES = {
    "decay_fraction": "wsd",
    "power": "polynomial",
    "cycles": "cosine_restarts",
    "cycle_growth": "cosine_restarts",
}
_HALF_STATES = (
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.fp16_master_weights_and_grads",
)


def optimizer_problems(run: RunConfig, ds: Mapping[str, Any], source: Source) -> Iterator[str]:
    """What keeps `optim.name` from stepping as it should, spread as `ds` says."""
    name = run.optim.name
    kind = OPTIMIZERS[name]
    asked = f"optim.name is {name!r} ({run.origin('optim.name')})"
    for setting in _SETTINGS:
        if setting not in kind.takes and run.is_set(f"optim.{setting}"):
            key = f"optim.{setting}"
            given = f"{key} is {run.get(key)} ({run.origin(key)})"
            yield f"{given}, which {name} does not take: remove it"
    for setting, schedule in _OF_SCHEDULES.items():
        key = f"optim.{setting}"
        if run.optim.schedule != schedule and run.is_set(key):
            given = f"{key} is {run.get(key)} ({run.origin(key)})"
            yield f"{given}, which is for optim.schedule={schedule}: remove it"
    if kind.package and not importlib.util.find_spec(kind.package):
        yield f"{asked}: it needs the package {kind.package} (pip install {kind.package})"
    stage = value_of(ds, "zero_optimization.stage")
    offload = offloaded_to(ds, "optimizer")
    moved = "zero_optimization.offload_optimizer"
    moved += f" ({source.of(f'{moved}.device')})"
    if kind.layouts == "whole" and stage != 0:
        yield (
            f"{asked}: it keeps means of rows and columns, but ZeRO {stage} "
            f"({source.of('zero_optimization.stage')}) gives it flat pieces: "
            "use zero_optimization.stage=0 in fp32, adam8bit for small states, or adamw"
        )
    if kind.layouts == "unoffloaded" and offload != "none":
        yield f"{asked}: its states stay on the GPU: remove {moved}, or use adamw"
    if offload == "nvme" and run.optim.clip_value is not None:
        given = f"optim.clip_value is {run.optim.clip_value} ({run.origin('optim.clip_value')})"
        yield f"{given}: gradients on NVMe are not clamped: set optim.clip_norm, or use the cpu"
    # Without momentum sgd has no states that could be in the wrong place or type.
    if not kind.by_deepspeed and (name != "sgd" or run.optim.momentum):
        if offload == "nvme":
            yield (
                f"{asked}: only adamw and adam step from NVMe: use one, or set the device of "
                f"{moved} to cpu"
            )
        for key in _HALF_STATES:
            if value_of(ds, key):
                given = f"{key} ({source.of(key)})"
                yield f"{asked}: only adamw and adam take {given}: remove it, or use adamw"
    yield from _clipping_problems(run, ds)


def _clipping_problems(run: RunConfig, ds: Mapping[str, Any]) -> Iterator[str]:
    if value_of(ds, "fp16.enabled") and run.optim.clip_value is not None:
        yield (
            f"optim.clip_value is {run.optim.clip_value} ({run.origin('optim.clip_value')}), which "
            "hides overflows from fp16's loss scaling: set optim.clip_norm instead"
        )


def rate_notes(run: RunConfig, steps: int | None) -> Iterator[dict[str, Any]]:
    """Events where the learning rate will not be what its key says, or is another optimizer's."""
    optim = run.optim
    if steps and steps < optim.warmup_steps:
        message = (
            f"the run ends within its warm-up ({optim.warmup_steps} steps, optim.warmup_steps)"
        )
        yield {"kind": "unfinished_warmup", "message": f"{message}: optim.lr is never reached"}
    if optim.name == "lion" and not run.is_set("optim.lr"):
        message = (
            f"optim.lr is {optim.lr:g}, adamw's default: lion takes a third to a tenth of that"
        )
        yield {"kind": "learning_rate", "message": message}


def rule_problems(run: RunConfig, shape: Shape) -> Iterator[str]:
    """Rules of optim.groups that fit no parameter: misspelt, in all likelihood."""
    names = [tensor.name for tensor in shape.tensors()]
    for rule in run.optim.groups:
        if not any(re.search(rule.pattern, name) for name in names):
            yield (
                f"optim.groups has the pattern {rule.pattern!r} ({run.origin('optim.groups')}), "
                f"which no parameter's name fits: they are {names[0]}, {names[-1]} and the like"
            )


def group_rules(run: RunConfig) -> tuple[GroupRule, ...]:
    """optim.groups as the planner and the engine take them."""
    return tuple(GroupRule(**rule.model_dump()) for rule in run.optim.groups)
