"""Routers that load every expert alike, as the estimate takes them to do."""

from __future__ import annotations

from typing import Any

import torch


def load_evenly(engine: Any) -> None:
    """Send each of an engine's divided experts equally many tokens."""
    for name, module in engine.module.named_modules():
        if name.endswith(".experts"):
            module.forward = _evenly(module.forward, module.num_experts * engine.plan.grid.expert)


def _evenly(forward: Any, experts: int) -> Any:
    def evenly(states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        each = torch.arange(index.numel(), device=index.device) % experts
        return forward(states, each.view_as(index), weights)

    return evenly
