"""Gradients of an engine, and fixes for what DeepSpeed leaves pending between calls.

tests/engine/deepspeed_0_19/ shows for each function that it is still needed. When such a test fails
after an upgrade, the function can be removed.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

from harness.engine.deepspeed_0_19.replaced import replaced


def settle_gradients(engine: Any) -> None:
    """Make gradients readable as soon as the last backward pass has been launched.

    ZeRO-1 and -2 copy offloaded gradients to the host and wait for the copy only at the start of
    `step`. Before that, reading may return the gradients of the previous step, and the copy would
    overwrite clamped ones. Gradients on the device are reduced on another stream, which some
    DeepSpeed versions do not wait for.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_wait_for_offload_copies"):
        optimizer._wait_for_offload_copies()
    for name in ("reduction_stream", "reduce_and_partition_stream"):
        if (stream := getattr(optimizer, name, None)) is not None:
            get_accelerator().current_stream().wait_stream(stream)


def gather_after_writing(engine: Any) -> None:
    """Make ZeRO-3's next all-gather of weights wait for writes on the current stream.

    DeepSpeed gathers on a separate stream, which does not wait for the previous step. If no weight
    is persistent (stage3_param_persistence_threshold 0), only the waits of the throughput timer
    would keep the next forward pass from reading half-updated weights.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())


def drop_skipped_gradients(engine: Any) -> None:
    """After a skipped step, drop its gradients so that they are not added to the next step's.

    With the optimizer on the CPU and fp32 accumulation beside 16-bit weights, ZeRO-2 clears them
    only after steps that it takes: after a NaN it would skip forever.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False) and not engine.was_step_applied():
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


def replay_adam_steps(optimizer: Any) -> None:
    """Restore the exact state of DeepSpeed's CPU Adam after a load.

    Its C++ code updates the powers of beta step by step, but recomputes them with `pow` when a step
    does not follow the last one: a resumed run would round differently from then on.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [state for state in inner.state.values() if "step" in state]
    if not states or type(inner).__name__ != "DeepSpeedCPUAdam":
        return  # the CUDA version always uses `pow`
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
    """Return True for the bare Exception that DeepSpeed raises at the minimum loss scale."""
    return type(error) is Exception and "loss scale already at minimum" in str(error)


def keeps_no_grad_norm(engine: Any) -> bool:
    """Return True for ZeRO-0 in fp32, which clips inside `step` and does not record a norm.

    `get_global_grad_norm` then returns None; the norm must be computed between backward and step.
    """
    return engine.zero_optimization_stage() == 0 and not (
        engine.fp16_enabled() or engine.bfloat16_enabled()
    )


@contextlib.contextmanager
def discarding(engine: Any) -> Iterator[None]:
    """Return a context in which a step discards its gradients, using DeepSpeed's overflow handling.

    The engine counts the step as skipped and is ready for the next; the loss scale is unchanged.
    DeepSpeed has no call for this. ZeRO-0 in fp32 has no overflow handling: it steps with NaN.
    """
    optimizer = engine.optimizer
    with contextlib.ExitStack() as stack:
        if keeps_no_grad_norm(engine):
            stack.enter_context(replaced(optimizer, "step", lambda *_, **__: None))
            stack.enter_context(replaced(optimizer, "overflow", True))
        else:
            module = sys.modules[type(optimizer).__module__]
            stack.enter_context(replaced(module, "is_invalid_grad_norm", lambda norm: True))
            stack.enter_context(replaced(optimizer, "_update_scale", lambda overflow: None))
        yield


def count_every_stage(parameters: Iterable[Any], is_copy: Callable[[Any], bool]) -> None:
    """Make ZeRO-0 in fp32 clip by the norm over all pipeline stages, without counting copies.

    DeepSpeed's `clip_grad_norm_` counts parameters that are not marked as model-parallel on the
    model's first rank only, and marked ones on all ranks, including the last stage's copy of a tied
    weight. The norm would be too small or too large, and so would the clipping.
    """
    for parameter in parameters:
        parameter.model_parallel = not is_copy(parameter)
        parameter.tensor_model_parallel = False


def add_norms_over_stages_once(engine: Any) -> None:
    """Make ZeRO-1 sum the gradient norm over pipeline stages once for all parameter groups.

    DeepSpeed sums it group by group. Stages with different numbers of groups (of optim.groups, or
    Muon's) would wait for each other forever.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    norm_of_groups, over_stages = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def norm_of_stages(norm_type: int = 2) -> torch.Tensor:
        with replaced(optimizer, "_model_parallel_all_reduce", lambda tensor, op: None):
            square: torch.Tensor = norm_of_groups(
                norm_type
            ).square()  # infinity if a gradient is not finite
        over_stages(tensor=square, op=dist.ReduceOp.SUM)
        return square.sqrt()

    optimizer.scaled_global_norm = norm_of_stages


def average_tied_gradients_first(engine: Any) -> None:
    """Average the gradients of tied weights over the data ranks before the two ends add theirs.

    DeepSpeed adds the ends first. Each end then sums over its own data ranks, in an order that
    depends on the place of the weight in its buffers: from three data ranks on, the copies differ
    in the last bits and drift apart. Its later average over the data ranks is then one of equal
    values.
    """

    def reduce(engine: Any) -> None:
        data = engine.mpu.get_data_parallel_group()
        for weight, ends in engine.module.get_tied_weights_and_groups():
            gradient = weight._hp_grad if engine.using_bf16_optimizer else weight.grad
            if gradient is not None:
                dist.all_reduce(gradient, group=data)
                gradient.div_(dist.get_world_size(data))
                dist.all_reduce(gradient, group=ends)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ReduceTiedGrads: reduce}


def reduce_in_place(engine: Any) -> None:
    """Make BF16_Optimizer reduce its flat gradients in place, and not at all on a single rank.

    DeepSpeed copies them into buffers of up to half a billion elements and back, even on a single
    rank, where fp32 sums are rounded to bf16 on the way. `size` divides the sum even on a single
    rank: experts without replicas still receive tokens from other ranks.
    """

    def reduce(flats: list[torch.Tensor], group: Any, size: float | None = None) -> None:
        for flat in flats:
            if dist.get_world_size(group) > 1:
                engine.allreduce_bucket([flat], group, size)
            elif size is not None and size != 1:
                flat.div_(size)

    if hasattr(engine.optimizer, "get_grads_for_reduction"):
        engine.allreduce_and_copy = reduce
