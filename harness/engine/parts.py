"""The part of the whole model's that each parameter of a rank is: noted on the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.engine.deepspeed_0_19 import internals
from harness.layout.box import Box, Part
from harness.layout.share import Share


def part_of(parameter: Any) -> Part:
    """Return what a parameter, shards of ZeRO put together, is of the whole model's: all of it,
    unless an axis that cuts parameters left another `part` on it.
    """
    part: Part | None = getattr(parameter, "part", None)
    return part or Part.of(internals.whole_shape(parameter))


def cutter(share: Share) -> Callable[[str, torch.Tensor], nn.Parameter]:
    """Return what makes this rank's parameter of a whole weight, with its `part` noted on it."""

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
    """Yield (name, whole tensor on the CPU) of parameters of which every rank of the group has a
    part, in the same order on all. Collective.

    `parts_of`: a parameter's parts, by rank of the group.
    """
    for name, own in tensors:
        parts = parts_of(name)
        if parts[0].is_whole:
            yield name, own
            continue
        theirs = [torch.empty(part.shape, dtype=own.dtype, device=device) for part in parts]
        dist.all_gather(theirs, own.to(device).contiguous(), group=group)
        whole = torch.empty(parts[0].whole, dtype=own.dtype)
        for part, tensor in zip(parts, theirs, strict=True):
            for of_whole, of_part in part.boxes():
                whole[_slices(of_whole)] = tensor[_slices(of_part)].cpu()
        yield name, whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


def note_copies(module: nn.Module, share: Share) -> None:
    """Note on every parameter whether ranks with other parts of the model have the same, for us and
    for DeepSpeed, which takes what is not marked for a copy on all tensor-parallel ranks but 0.
    """
    parameter: Any
    for name, parameter in module.named_parameters():
        part = part_of(parameter)
        parameter.is_copy = not share.is_first(name, part.whole)
        parameter.tensor_model_parallel = not (part.is_whole or parameter.is_copy)


def is_copy(parameter: nn.Parameter) -> bool:
    """Return whether another rank saves the same of a parameter, and counts it in the norm."""
    return internals.is_pipe_copy(parameter) or bool(getattr(parameter, "is_copy", False))


def note_given(model: nn.Module) -> None:
    """Note on every frozen parameter that its values come from model.init_from."""
    parameter: Any
    for parameter in model.parameters():
        parameter.is_given = not parameter.requires_grad


def is_given(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's values are read from model.init_from at every start: they are
    in no checkpoint.
    """
    return bool(getattr(parameter, "is_given", False))
