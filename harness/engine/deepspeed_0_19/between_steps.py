"""Fewer kernels and bytes between the last backward kernel of a step and the next forward pass.

A step of Adam needs to read a gradient, a master weight and two moments, and to write the latter
three and the weight: 30 bytes per parameter, in some ten kernels. DeepSpeed 0.19.8 moves 46 to 70
in its step and 18 to 38 in a micro-batch, in several kernels for each tensor: docs/host_waits.md
counts them.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.zero import stage_1_and_2

_CHUNK = 1 << 12  # elements; in fp32 a CPU's sum of 65,536 squares is wrong by 1e-7


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors together, in a few kernels on a GPU and without a copy."""
    parts = [*tensors]
    if parts[0].device.type == "cpu":  # a GPU divides them itself
        parts = [part for tensor in tensors for part in tensor.reshape(-1).split(_CHUNK)]
    norms = torch.stack(torch._foreach_norm(parts, 2, torch.float32))  # of 16 bits, too
    norm: torch.Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm


def norms_and_clips_at_once() -> None:
    """Make BF16_Optimizer compute its norm, and clip, in a few kernels for all tensors."""
    norm_of_each = utils.get_global_norm_of_tensors

    def norm(input_tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = [norm_of(input_tensors)] if input_tensors else []
        result: torch.Tensor = norm_of_each(whole, *args, **kwargs)
        return result

    def clip(
        input_tensors: list[torch.Tensor], max_norm: float, global_norm: torch.Tensor, mpu: Any
    ) -> None:
        factor = max_norm / (global_norm + 1e-6)
        if factor < 1:  # the host has waited for the norm
            torch._foreach_mul_(input_tensors, factor)

    bf16_optimizer.get_global_norm_of_tensors = norm
    bf16_optimizer.clip_tensors_by_global_norm = clip


def mask_without_a_wait() -> None:
    """Make ZeRO 1 and 2 mark a norm that is not finite without a copy to the device."""

    def mask(norm: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
        norm.copy_(torch.where(norm.isfinite(), norm, val))

    for module in (utils, stage_1_and_2):
        module.mask_nan_or_inf_with_val_inplace = mask


def add_without_a_cast() -> None:
    """Make ZeRO 1 and 2 add a gradient to its fp32 sum without an fp32 copy of it."""

    def add(output: torch.Tensor | None, source: torch.Tensor) -> None:
        if output is not None:
            output.add_(source)

    stage_1_and_2.DeepSpeedZeroOptimizer._add_to_grad_partition_buffer = staticmethod(add)


def sum_at_once(engine: Any) -> None:
    """Make BF16_Optimizer copy a step's first gradients into its fp32 sums, and free them.

    DeepSpeed zeroes the sums twice a step, adds an fp32 copy of each gradient, and keeps the
    gradients, to which the next backward pass adds after they were zeroed.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "update_hp_grads") or optimizer.immediate_grad_update:
        return
    is_first = True
    groups = [*zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)]
    sums = [[s.view(w.shape) for w, s in zip(*group, strict=True)] for group in groups]
    for weight, flat in chain.from_iterable(zip(*group, strict=True) for group in groups):
        weight._hp_grad = flat

    def clear() -> None:
        nonlocal is_first
        is_first = True
        for has_gradients in optimizer.fp32_groups_has_gradients:
            has_gradients[:] = [False] * len(has_gradients)

    def update(clear_lp_grads: bool = False) -> None:
        nonlocal is_first
        for weights, into, has in zip(
            optimizer.bf16_groups, sums, optimizer.fp32_groups_has_gradients, strict=True
        ):
            given = [n for n, weight in enumerate(weights) if weight.grad is not None]
            if is_first and (unused := {*range(len(weights))}.difference(given)):
                torch._foreach_zero_([into[n] for n in sorted(unused)])
            if given:
                write = torch._foreach_copy_ if is_first else torch._foreach_add_
                write([into[n] for n in given], [weights[n].grad for n in given])
            for n in given:
                has[n], weights[n].grad = True, None
        is_first = False

    optimizer.clear_hp_grads = clear
    optimizer.update_hp_grads = torch.no_grad()(update)


def take_norm_at_once(engine: Any) -> None:
    """Make ZeRO 1 to 3 compute the norm in a few kernels, without copies in fp64, look for NaN and
    infinity in it alone, and scale gradients only if that changes them.

    With tensor or pipeline ranks DeepSpeed leaves out some tensors by rank; its code remains.
    """
    optimizer = engine.optimizer
    if engine.mpu is not None or not hasattr(optimizer, "get_grad_norm_direct"):
        return
    norm_of_each: Callable[..., torch.Tensor] = optimizer.get_grad_norm_direct
    scale: Callable[..., None] = optimizer.unscale_and_clip_grads

    def norm(gradients: Any, params: Sequence[Any], norm_type: float = 2) -> torch.Tensor:
        each = [*gradients]
        if not each or not params:
            return norm_of_each(gradients, params, norm_type)
        return norm_of_each([norm_of(each)], params[:1], norm_type)

    judged: tuple[Any, bool] = None, True

    def scale_if_needed(gradients: Any, total_norm: torch.Tensor | None) -> None:
        nonlocal judged
        if total_norm is not judged[0]:  # once for all groups; the host has waited for the norm
            most = optimizer.clip_grad
            is_small = not most or total_norm is None or float(total_norm) + 1e-6 <= most
            judged = total_norm, is_small
        if optimizer.loss_scale != 1 or not judged[1]:
            scale(gradients, total_norm)

    optimizer.get_grad_norm_direct = norm
    optimizer.unscale_and_clip_grads = scale_if_needed
    if getattr(optimizer, "compute_grad_norm", False) and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda **_: None


def step_where_sums_lie(engine: Any) -> None:
    """Make ZeRO 3 step on its sums of gradients themselves: they lie in one buffer, in order."""
    optimizer = engine.optimizer
    buffer: torch.Tensor | None = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is None:
        return
    copied: Callable[[Sequence[torch.Tensor]], torch.Tensor] = optimizer.flatten
    place = buffer.untyped_storage().data_ptr()

    def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = [tensor.numel() for tensor in tensors]
        begin = int(tensors[0].storage_offset())
        starts = [*accumulate(sizes, initial=begin)]
        if all(
            tensor.untyped_storage().data_ptr() == place and tensor.storage_offset() == start
            for tensor, start in zip(tensors, starts, strict=False)
        ):
            return buffer.narrow(0, begin, starts[-1] - begin)
        return copied(tensors)

    optimizer.flatten = flatten
