"""Defects in what the optimizer does, and with which numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from harness.layout.world import World
from tests.gates.parity import recipe
from tests.gates.parity.defects.seams import (
    Planted,
    before_stepping,
    initialized_with,
    wrapped,
)


@contextlib.contextmanager
def adam_step_off_by_one(world: World) -> Iterator[None]:
    """Adam takes an empty step before its first: all that remains of it is the step count."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    with contextlib.ExitStack() as stack:
        for owner in (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW):
            step = _with_empty_first_step(owner.step)
            stack.enter_context(mock.patch.object(owner, "step", step))
        yield


def _with_empty_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = [
            (p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        if gradients and not any(self.state[parameter] for parameter, _ in gradients):
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = 0.0
            for parameter, gradient in gradients:
                parameter.grad = torch.zeros_like(gradient)
            original(self, *args, **kwargs)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
            for parameter, gradient in gradients:
                parameter.grad = gradient
        return original(self, *args, **kwargs)

    return step


def group_values(change: Callable[[dict[str, Any]], None]) -> Planted:
    """Change every parameter group on its way to DeepSpeed."""

    def every(config: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        for group in groups:
            change(group)

    return lambda world: initialized_with(every)


def json_values(change: Callable[[dict[str, Any]], object]) -> Planted:
    """Change the JSON on its way to DeepSpeed."""
    return lambda world: initialized_with(lambda config, _: change(config))


def with_l2(config: dict[str, Any]) -> None:
    """Weight decay is added to the gradient, where it is to be decoupled."""
    config["optimizer"]["type"] = "Adam"
    config["optimizer"]["params"]["adam_w_mode"] = False


def adam_with(**values: Any) -> Planted:
    """Adam gets other parameters than the plan says."""
    return json_values(lambda config: config["optimizer"]["params"].update(values))


def rate_of_last_step(world: World) -> contextlib.AbstractContextManager[None]:
    """The learning rate comes one step late."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, lr: float, discard: bool = False) -> Any:
            late, self.late = getattr(self, "late", lr), lr
            return original(self, late, discard)

        return apply

    return wrapped("apply", wrap)


def rate_of_first_group(world: World) -> contextlib.AbstractContextManager[None]:
    """The learning rate reaches the first parameter group only."""

    def change(engine: Any) -> None:
        for group in engine.optimizer.param_groups[1:]:
            group["lr"] = recipe.LR * group["lr_multiplier"]

    return before_stepping(change)


def rate_times_ranks(world: World) -> contextlib.AbstractContextManager[None]:
    """The learning rate is scaled by the number of ranks."""

    def change(engine: Any) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] *= world.world_size

    return before_stepping(change)


def moments_forgotten(world: World) -> contextlib.AbstractContextManager[None]:
    """Adam's first moments begin anew in every step."""

    def change(engine: Any) -> None:
        for state in engine.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"].zero_()

    return before_stepping(change)


def masters_rounded(world: World) -> contextlib.AbstractContextManager[None]:
    """Master weights are kept in bf16."""

    def change(engine: Any) -> None:
        for group in engine.optimizer.param_groups:
            for master in group["params"]:
                master.data.copy_(master.data.bfloat16())

    return before_stepping(change)


def clipped_norm_reported(world: World) -> contextlib.AbstractContextManager[None]:
    """The norm is reported as it is after clipping."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, *inputs: Any) -> float:
            return min(float(original(self, *inputs)), recipe.CLIP_NORM)

        return apply

    return wrapped("apply", wrap)
