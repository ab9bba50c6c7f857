"""Norm of the weights, and how much a step changes them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness.checkpoint.fragment import WEIGHT
from harness.config.ds_keys import offloaded_to
from harness.data.batch import on_device
from harness.engine.api import Engine

SAMPLED = 2**20
"""Weights of a rank of which the change is measured, evenly distributed; all of fewer."""


class WeightChange:
    """Measures single steps: the norm of all weights, and that of their change over it.

    Nothing waits for the device. A copy of all weights would not fit where the plan is tight: the
    change is that of every n-th weight. Weights on NVMe are not read for this.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._on_nvme = offloaded_to(engine.plan.deepspeed, "optimizer") == "nvme"
        self._step = 0
        self._before: list[torch.Tensor] = []

    @torch.no_grad()
    def step_begins(self, step: int) -> None:
        """Keep what a step will change."""
        if not self._on_nvme:
            self._step, self._before = step, _sample(self._weights())

    @torch.no_grad()
    def taken(self, step: int) -> dict[str, torch.Tensor]:
        """Return `param_norm` and `update_ratio`, on the device, after a step that was announced;
        otherwise nothing. Collective.
        """
        before, self._before = self._before, []
        if step != self._step:
            return {}
        weights = self._weights()
        changes = [new - old for new, old in zip(_sample(weights), before, strict=True)]
        norms = [_norm(tensors) for tensors in (weights, changes, before)]
        squares = torch.stack([on_device(norm, self._engine.device) for norm in norms]).square()
        squares[1:] *= _stride(weights)
        dist.all_reduce(squares)
        norm, change, whole = squares.sqrt()
        return {"param_norm": norm, "update_ratio": change / whole}

    def _weights(self) -> list[torch.Tensor]:
        return [fragment.tensors[WEIGHT] for fragment in self._engine.fragments(states=False)]


def _stride(weights: list[torch.Tensor]) -> int:
    return max(1, sum(weight.numel() for weight in weights) // SAMPLED)


def _sample(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return every n-th element of each, copied, in fp32."""
    stride = _stride(weights)
    return [weight[::stride].to(torch.float32, copy=True) for weight in weights]


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.nn.utils.get_total_norm(norms).double()
