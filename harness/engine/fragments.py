"""The slices and shards of weights and gradients that a rank holds under DeepSpeed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn

from harness.data.batch import on_device
from harness.engine.deepspeed_0_19 import internals
from harness.layout.box import Box, Part
from harness.layout.grid import Share


def part_of(parameter: Any) -> Part:
    """Return a parameter's slice of the full one, disregarding ZeRO's shards."""
    part: Part | None = getattr(parameter, "part", None)
    return part or Part.of(internals.whole_shape(parameter))


def cutter(share: Share) -> Callable[[str, torch.Tensor], nn.Parameter]:
    """Return a function that cuts this rank's parameter out of a weight, and notes its `part`."""

    def cut(name: str, whole: torch.Tensor) -> nn.Parameter:
        part, tensor = share.part(name, tuple(whole.shape)), whole
        for dimension, ranges in enumerate(part.ranges):
            if ranges != ((0, whole.shape[dimension]),):
                taken = [tensor.narrow(dimension, at, end - at) for at, end in ranges]
                tensor = torch.cat(taken, dimension)
        parameter: Any = nn.Parameter(tensor)
        parameter.part = part
        return parameter  # type: ignore[no-any-return]

    return cut


def assembled(
    tensors: Iterable[tuple[str, torch.Tensor]],
    parts_of: Callable[[str], list[Part]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor on the CPU) of parameters that are sliced over a group. Collective.

    `parts_of` returns a parameter's slices, by rank of the group.
    """
    for name, own in tensors:
        parts = parts_of(name)
        if parts[0].is_whole:
            yield name, own
            continue
        slices = [torch.empty(part.shape, dtype=own.dtype, device=device) for part in parts]
        dist.all_gather(slices, own.to(device).contiguous(), group=group)
        whole = torch.empty(parts[0].whole, dtype=own.dtype)
        for part, tensor in zip(parts, slices, strict=True):
            for of_whole, of_part in part.boxes():
                whole[_slices(of_whole)] = tensor[_slices(of_part)].cpu()
        yield name, whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


def note_copies(module: nn.Module, share: Share) -> None:
    """Record on every parameter whether another model-parallel rank has the same one.

    `is_copy` is for the harness. `tensor_model_parallel` is for DeepSpeed, which treats unmarked
    parameters as copies on every tensor-parallel rank but 0.
    """
    parameter: Any
    for name, parameter in module.named_parameters():
        part = part_of(parameter)
        parameter.is_copy = not share.is_first(name, part.whole)
        parameter.tensor_model_parallel = not (part.is_whole or parameter.is_copy)


def is_copy(parameter: nn.Parameter) -> bool:
    """Return True if another rank saves the same parameter and counts it in the norm."""
    return internals.is_pipe_copy(parameter) or bool(getattr(parameter, "is_copy", False))


def mark_frozen_base(model: nn.Module) -> None:
    """Record on every frozen parameter that its values come from model.init_from."""
    parameter: Any
    for parameter in model.parameters():
        parameter.is_frozen_base = not parameter.requires_grad


def is_frozen_base(parameter: nn.Parameter) -> bool:
    """Return True if a parameter is not saved: every start reads it from model.init_from."""
    return bool(getattr(parameter, "is_frozen_base", False))


def local_gradients(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter with a view of the gradient elements for this rank's optimizer.

    Valid between the last backward pass of a step and the optimizer step. In fp16 they are still
    multiplied by the loss scale.
    """
    for parameter in module.parameters():
        if internals.is_partitioned(parameter):
            yield parameter, internals.shard_gradient(parameter)
        elif internals.is_linked(parameter):
            fragment = internals.linked_gradient(parameter)
            if fragment is not None:
                yield parameter, fragment
        elif parameter.grad is not None:  # ZeRO-0
            yield parameter, parameter.grad


def grad_norm(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Return the norm of all gradients, summed over the ranks of `group` if there is one.

    `device`: the engine's, on which the ranks communicate; offloaded gradients are on the host.
    """
    gradients = [g.detach().float() for p, g in local_gradients(module) if not is_copy(p)]
    norm = on_device(torch.nn.utils.get_total_norm(gradients), device)
    if group is None:
        return norm
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter), without the last pipeline stage's copies."""
    return ((n, p) for n, p in module.named_parameters() if not internals.is_pipe_copy(p))


def full_gradients(module: nn.Module, loss_scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, fp32 gradient on the CPU) of every parameter. Collective."""
    for name, parameter in _named_parameters(module):
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            yield name, gradient.detach().float().cpu() / loss_scale


def full_masters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, fp32 master weight on the CPU) of every parameter. Collective."""
    for name, parameter in _named_parameters(module):
        master = safe_get_full_fp32_param(parameter)
        master = parameter if master is None else master  # ZeRO-0 in fp32 has no second copy
        yield name, master.detach().float().to("cpu", copy=True)


def clip_by_value(module: nn.Module, limit: float, norm: torch.Tensor) -> None:
    """Clamp every gradient element to [-limit, limit]; set all to NaN if `norm` is not finite.

    Otherwise an infinite gradient would become the limit and be applied.
    """
    one_or_nan = 1 + 0 * norm
    for _, gradient in local_gradients(module):
        one_or_nan = one_or_nan.to(gradient.device)  # all gradients share a device: moved once
        gradient.clamp_(-limit, limit).mul_(one_or_nan)


def stored_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yield (name, parameter, its elements stored on this rank between steps), as views."""
    for name, parameter in module.named_parameters():
        if internals.is_whole(parameter):
            yield name, parameter, parameter.detach()
        else:  # without the padding of the last shard
            numel = max(0, internals.shard_of(parameter).numel)
            yield name, parameter, internals.shard_tensor(parameter)[:numel]
