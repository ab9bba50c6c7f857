"""Stand-ins for the kernels of a GPU: one launch each, for which the host waits nowhere."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.models import varlen
from tools.proofs.streams.memory import Memory

_tolist = torch.Tensor.tolist  # before the simulator takes it for a wait


def varlen_kernel(memory: Memory) -> varlen.Kernel:
    """Return attention within documents that reads their bounds on the device, as kernels do."""

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: torch.Tensor,
        _longest: int,
        **how: Any,
    ) -> torch.Tensor:
        alone = functools.partial(varlen.alone, **how)
        output: torch.Tensor = _Launched.apply(query, key, value, bounds, alone, memory)  # type: ignore[no-untyped-call]
        return output

    return kernel


class _Launched(torch.autograd.Function):
    """The CPU's attention document by document, seen as one operation."""

    @staticmethod
    def forward(context: Any, *inputs: Any) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads, head_dim)."""
        query, key, value, bounds, alone, memory = inputs
        context.memory = memory
        with _disable_current_modes():
            places = _tolist(bounds)
            output = varlen.InTurn.forward(context, query, key, value, places, alone)
        memory.run([(tensor, False) for tensor in (query, key, value, bounds)], [output])
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of queries, keys and values."""
        saved = context.saved_tensors
        with _disable_current_modes():
            gradients = varlen.gradients_in_turn(saved[:3], context.bounds, context.alone, gradient)
        context.memory.run([(tensor, False) for tensor in (gradient, *saved)], [*gradients])
        return *gradients, None, None, None
