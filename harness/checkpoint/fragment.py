"""The unit of a checkpoint: consecutive elements of one parameter, and their optimizer states."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from harness.layout.box import Part

WEIGHT = "weight"
BUFFER = "buffer"


@dataclass(frozen=True)
class Fragment:
    """Elements [offset, offset + numel) of a part of a parameter, flattened; views of live memory.

    `tensors`, by kind: "weight" (what the optimizer steps: the fp32 master weight where there is
    one), "exp_avg", ... as the optimizer names its states, each (numel,); or "buffer" alone.
    `part`: all of the parameter unless an axis of the layout cuts it.
    """

    name: str
    part: Part
    offset: int
    tensors: dict[str, torch.Tensor]

    @property
    def numel(self) -> int:
        """Elements in this fragment."""
        return next(iter(self.tensors.values())).numel()

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def narrow(self, start: int, numel: int) -> Fragment:
        """Return elements [start, start + numel) of this fragment."""
        tensors = {kind: t.narrow(0, start, numel) for kind, t in self.tensors.items()}
        return replace(self, offset=self.offset + start, tensors=tensors)

    def share(self, index: int, shares: int) -> Fragment | None:
        """Return the elements that rank `index` of `shares` replicas writes; None if none."""
        size = math.ceil(self.numel / shares)
        start = index * size
        numel = min(size, self.numel - start)
        return self.narrow(start, numel) if numel > 0 else None
