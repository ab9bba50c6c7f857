"""The places around the real engine where a defect can be planted."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from harness.data.batch import Batch
from harness.layout.world import World

Planted = Callable[[World], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def wrapped(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap the method `name` of every engine that has one of its own."""
    from harness.engine.pipeline import PipelineEngine
    from harness.engine.zero import ZeroEngine

    with contextlib.ExitStack() as stack:
        for engine in (ZeroEngine, PipelineEngine):
            if name in vars(engine):
                changed = wrap(getattr(engine, name))
                stack.enter_context(mock.patch.object(engine, name, changed))
        yield


def batches_changed(
    change: Callable[[list[Batch]], object],
) -> contextlib.AbstractContextManager[None]:
    """Change a rank's micro-batches of every step before they are trained on."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def accumulate(self: Any, batches: list[Batch], targets: int) -> torch.Tensor:
            change(batches)
            done: torch.Tensor = original(self, batches, targets)
            return done

        return accumulate

    return wrapped("accumulate", wrap)


def before_stepping(change: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Give `change` the DeepSpeed engine when learning rates are set and the step is to come."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any) -> None:
            change(self.engine)
            original(self)

        return step

    return wrapped("_step", wrap)


@contextlib.contextmanager
def initialized_with(change: Callable[[dict[str, Any], Any], object]) -> Iterator[None]:
    """Change the JSON and the parameter groups that reach DeepSpeed."""
    import deepspeed

    def initialize(**kwargs: Any) -> Any:
        kwargs["config"] = copy.deepcopy(kwargs["config"])
        change(kwargs["config"], kwargs["model_parameters"])
        return original(**kwargs)

    original = deepspeed.initialize
    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


@contextlib.contextmanager
def losses_changed(
    change: Callable[..., Any],
) -> Iterator[None]:
    """Change a micro-batch's summed loss and balancing loss; `change` gets its labels, too."""
    from harness.engine import forward, pipeline

    def changed(original: Callable[..., Any]) -> Callable[..., Any]:
        def losses(model: Any, inputs: Any, labels: torch.Tensor, *more: Any) -> Any:
            return change(*original(model, inputs, labels, *more), labels)

        return losses

    with (
        mock.patch.object(forward, "forward", changed(forward.forward)),
        mock.patch.object(pipeline, "losses", changed(pipeline.losses)),
    ):
        yield


@contextlib.contextmanager
def model_config_with(change: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Change the values of a model's file on their way to transformers."""
    from harness.models import skeleton

    def for_model(model_type: str, **values: Any) -> Any:
        change(values)
        return original(model_type, **values)

    original = skeleton.AutoConfig.for_model
    with mock.patch.object(skeleton.AutoConfig, "for_model", staticmethod(for_model)):
        yield


@contextlib.contextmanager
def gradients_scaled_by(factor: float) -> Iterator[None]:
    """Scale every gradient; the reported loss stays right."""

    def scale(loss: torch.Tensor, balancing: torch.Tensor | None, _: torch.Tensor) -> Any:
        return _ScaledGradient.apply(loss, factor), (
            None if balancing is None else _ScaledGradient.apply(balancing, factor)
        )

    with losses_changed(scale):
        yield


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.factor, None
