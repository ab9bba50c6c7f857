"""The part of the whole model's that each parameter of a rank is: noted on the parameter."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.engine.deepspeed_0_19 import internals
from harness.layout.box import Part
from harness.layout.share import Share


def part_of(parameter: Any) -> Part:
    """Return what a parameter, shards of ZeRO put together, is of the whole model's: all of it,
    unless an axis that cuts parameters left another `part` on it.
    """
    part: Part | None = getattr(parameter, "part", None)
    return part or Part.of(internals.whole_shape(parameter))


def note_copies(module: nn.Module, share: Share) -> None:
    """Note on every parameter whether ranks with other parts of the model have the same."""
    for name, parameter in module.named_parameters():
        parameter.is_copy = not share.is_first(name, part_of(parameter).whole)  # type: ignore[attr-defined]


def is_copy(parameter: nn.Parameter) -> bool:
    """Return whether another rank saves the same of a parameter, and counts it in the norm."""
    return internals.is_pipe_copy(parameter) or bool(getattr(parameter, "is_copy", False))
