"""Defects that the gate must catch, planted one at a time around the real engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from harness.models.pieces import decoder_layers
from harness.planning.world import World


@contextlib.contextmanager
def gradients_doubled(world: World) -> Iterator[None]:
    """Every gradient is twice as large: what a wrong average over ranks or steps does."""
    from harness.engine import pipeline, zero

    def doubling(original: Callable[..., Any]) -> Callable[..., Any]:
        def doubled(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            loss, auxiliary = original(*inputs)
            # The reported loss stays right; only its gradient is doubled.
            auxiliary = None if auxiliary is None else _double_gradient(auxiliary)
            return _double_gradient(loss), auxiliary

        return doubled

    with (
        mock.patch.object(zero, "forward", doubling(zero.forward)),
        mock.patch.object(pipeline, "losses", doubling(pipeline.losses)),
    ):
        yield


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
        given = [(p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if given and not any(self.state[parameter] for parameter, _ in given):
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = 0.0
            for parameter, gradient in given:
                parameter.grad = torch.zeros_like(gradient)
            original(self, *args, **kwargs)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
            for parameter, gradient in given:
                parameter.grad = gradient
        return original(self, *args, **kwargs)

    return step


@contextlib.contextmanager
def sample_dropped(world: World) -> Iterator[None]:
    """The last rank trains its first sample's micro-batch without that sample."""
    from harness.engine.pipeline import PipelineEngine
    from harness.engine.zero import ZeroEngine

    def dropping(original: Callable[..., Any]) -> Callable[..., Any]:
        def accumulate(self: Any, batches: list[Any], targets: int) -> torch.Tensor:
            if world.rank == world.world_size - 1:
                batches[0].labels[-1] = -100
            return original(self, batches, targets)

        return accumulate

    with contextlib.ExitStack() as stack:
        for engine in (ZeroEngine, PipelineEngine):
            accumulate = dropping(engine.accumulate)
            stack.enter_context(mock.patch.object(engine, "accumulate", accumulate))
        yield


@contextlib.contextmanager
def clipping_off(world: World) -> Iterator[None]:
    """The JSON that reaches DeepSpeed says 0 where the plan says otherwise."""
    with _initialize_with(lambda config, groups: config.update(gradient_clipping=0.0)):
        yield


@contextlib.contextmanager
def norms_decayed(world: World) -> Iterator[None]:
    """Weight decay also reaches norms, biases and embeddings."""

    def decay(config: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        largest = max(group["weight_decay"] for group in groups)
        for group in groups:
            group["weight_decay"] = largest

    with _initialize_with(decay):
        yield


@contextlib.contextmanager
def document_mask_dropped(world: World) -> Iterator[None]:
    """Tokens attend across document boundaries; positions stay right."""
    finder = "transformers.masking_utils.find_packed_sequence_indices"
    with mock.patch(finder, return_value=None):
        yield


@contextlib.contextmanager
def layers_swapped(world: World) -> Iterator[None]:
    """The first stage runs its first two layers in the wrong order."""
    from harness.models.stage import Stage

    def forward(self: Any, inputs: Any) -> Any:
        first, second, *_ = decoder_layers(self.model)[1]
        if self.enter is not None:
            return original(self, inputs)
        with (
            mock.patch.object(first, "forward", second.forward),
            mock.patch.object(second, "forward", first.forward),
        ):
            return original(self, inputs)

    original = Stage.forward
    with mock.patch.object(Stage, "forward", forward):
        yield


@contextlib.contextmanager
def tied_gradients_apart(world: World) -> Iterator[None]:
    """Each end of the pipeline keeps its own part of a tied weight's gradient."""
    from harness.engine.pipeline import StageModule

    with mock.patch.object(StageModule, "get_tied_weights_and_groups", return_value=[]):
        yield


@contextlib.contextmanager
def _initialize_with(change: Callable[[dict[str, Any], Any], None]) -> Iterator[None]:
    import deepspeed

    def initialize(**kwargs: Any) -> Any:
        kwargs["config"] = dict(kwargs["config"])
        change(kwargs["config"], kwargs["model_parameters"])
        return original(**kwargs)

    original = deepspeed.initialize
    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


class _DoubleGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def _double_gradient(value: torch.Tensor) -> torch.Tensor:
    doubled: torch.Tensor = _DoubleGradient.apply(value)
    return doubled


DEFECTS = {
    "gradients x2": gradients_doubled,
    "Adam's step off by one": adam_step_off_by_one,
    "one sample dropped": sample_dropped,
    "no clipping": clipping_off,
    "decay on norms": norms_decayed,
    "a dropped attention mask": document_mask_dropped,
}
PIPELINE_DEFECTS = {
    "a stage's layers in the wrong order": layers_swapped,
    "a dropped sum of tied gradients": tied_gradients_apart,
}


def planted(defect: str | None, world: World) -> contextlib.AbstractContextManager[None]:
    """The context in which a defect acts; None plants nothing."""
    return (DEFECTS | PIPELINE_DEFECTS)[defect](world) if defect else contextlib.nullcontext()
