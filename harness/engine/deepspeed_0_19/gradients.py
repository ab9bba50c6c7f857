"""Gradients of an engine, and what an engine leaves open between calls.

tests/engine/deepspeed_0_19/ shows for each that it is still needed: when such a test fails after an
upgrade, the function can go.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from harness.engine.deepspeed_0_19.replaced import replaced


def settle_gradients(engine: Any) -> None:
    """Let gradients be read as soon as the last backward pass was launched.

    ZeRO-1 and -2 copy offloaded gradients to the host, and wait for that at the head of `step`
    alone: read before, they may be the last step's; clamped before, the copy overwrites them.
    Those on the device are reduced on another stream, which other DeepSpeeds may not wait for.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_wait_for_offload_copies"):
        optimizer._wait_for_offload_copies()
    for name in ("reduction_stream", "reduce_and_partition_stream"):
        if (stream := getattr(optimizer, name, None)) is not None:
            get_accelerator().current_stream().wait_stream(stream)


def gather_after_writing(engine: Any) -> None:
    """Let ZeRO-3's next gather of weights wait for those being written on the current stream.

    DeepSpeed gathers on a stream of its own, which waits for no step before. If no weight is
    persistent (stage3_param_persistence_threshold 0), nothing but the throughput timer's waits
    keeps the next forward pass from weights that are half old.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())


def drop_skipped_gradients(engine: Any) -> None:
    """Keep a step that was skipped out of the next one's gradients, after it.

    With the optimizer on the CPU and sums in fp32 beside 16-bit weights, ZeRO-2 clears them after
    the steps that it takes alone: after NaN it would skip for ever.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False) and not engine.was_step_applied():
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


def replay_adam_steps(optimizer: Any) -> None:
    """Bring DeepSpeed's Adam on the CPU to where the run was saved, exactly; after a load.

    Its C++ multiplies the powers of beta up step by step, but takes them by `pow` when it meets a
    step that does not follow the last: a resumed run would round differently from then on.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [state for state in inner.state.values() if "step" in state]
    if not states or type(inner).__name__ != "DeepSpeedCPUAdam":
        return  # CUDA's takes them by `pow` always
    value = torch.zeros(1)
    value.grad = torch.zeros(1)
    kept = inner.state, inner.param_groups
    group = {**inner.param_groups[0], "lr": 0.0, "params": [value]}
    group.pop("step", None)
    inner.state, inner.param_groups = defaultdict(dict), [group]
    try:
        for _ in range(max(int(state["step"]) for state in states)):
            inner.step()
    finally:
        inner.state, inner.param_groups = kept


def is_minimum_loss_scale(error: Exception) -> bool:
    """Return True for DeepSpeed's bare Exception on a loss scale that cannot fall further."""
    return type(error) is Exception and "loss scale already at minimum" in str(error)


def keeps_no_grad_norm(engine: Any) -> bool:
    """True for ZeRO-0 in fp32, which clips inside `step` and records no norm at all.

    `get_global_grad_norm` is then None; the norm has to be taken between backward and step.
    """
    return engine.zero_optimization_stage() == 0 and not (
        engine.fp16_enabled() or engine.bfloat16_enabled()
    )


@contextlib.contextmanager
def discarding(engine: Any) -> Iterator[None]:
    """Let a step throw its gradients away, in DeepSpeed's own way out of an overflow.

    The engine counts it as skipped and is clean for the next; the loss scale stays. DeepSpeed has
    no call for that, and ZeRO-0 in fp32 has no way out at all: it steps with NaN as with anything.
    """
    optimizer = engine.optimizer
    with contextlib.ExitStack() as stack:
        if keeps_no_grad_norm(engine):
            stack.enter_context(replaced(optimizer, "step", lambda *_, **__: None))
            stack.enter_context(replaced(optimizer, "overflow", True))
        else:
            room = sys.modules[type(optimizer).__module__]
            stack.enter_context(replaced(room, "is_invalid_grad_norm", lambda norm: True))
            stack.enter_context(replaced(optimizer, "_update_scale", lambda overflow: None))
        yield


def count_every_stage(parameters: Iterable[Any], is_copy: Callable[[Any], bool]) -> None:
    """Let ZeRO-0 in fp32 clip by the norm over all pipeline stages, copies left out.

    DeepSpeed's `clip_grad_norm_` counts on the first rank of a model alone what is not marked as
    split over model-parallel ranks, and what is marked on all, also the last stage's copy of a tied
    weight: the norm is too small, or too large, and the clipping with it.
    """
    for parameter in parameters:
        parameter.model_parallel = not is_copy(parameter)
        parameter.tensor_model_parallel = False


def add_norms_over_stages_once(engine: Any) -> None:
    """Let ZeRO-1 sum the gradient norm over pipeline stages once for all parameter groups.

    DeepSpeed sums it group by group. Stages that have different numbers of groups (a rule of
    optim.groups or Muon's matrices may fit some stages alone) would wait for each other for ever.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    norm_of_groups, over_stages = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def norm_of_stages(norm_type: int = 2) -> torch.Tensor:
        with replaced(optimizer, "_model_parallel_all_reduce", lambda tensor, op: None):
            square: torch.Tensor = norm_of_groups(
                norm_type
            ).square()  # infinity where one is not finite
        over_stages(tensor=square, op=dist.ReduceOp.SUM)
        return square.sqrt()

    optimizer.scaled_global_norm = norm_of_stages


def reduce_in_place(engine: Any) -> None:
    """Let BF16_Optimizer reduce its flat gradients where they lie, and alone not at all.

    DeepSpeed packs them into buffers of up to half a billion elements and copies those back; on one
    rank, too, where fp32 sums are rounded to bf16 on the way. `size`: by which the sum is divided;
    of experts that one rank alone has, more ranks have sent tokens.
    """

    def reduce(flats: list[torch.Tensor], group: Any, size: float | None = None) -> None:
        for flat in flats:
            if dist.get_world_size(group) > 1:
                engine.allreduce_bucket([flat], group, size)
            elif size is not None and size != 1:
                flat.div_(size)

    if hasattr(engine.optimizer, "get_grads_for_reduction"):
        engine.allreduce_and_copy = reduce
