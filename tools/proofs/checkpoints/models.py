"""Models that no run config can ask for: with weights that nobody trains, and with buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tools.proofs.models import FROZEN

# A matrix that is cut into shares, and a vector that ZeRO-3 may keep whole.
FROZEN_WEIGHTS = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
BUFFERS = {"steps_seen": torch.tensor(7), "load": torch.tensor([0.25, -3.0, 1e-3, 5.0, 0.125])}
BLANK_SEED = 1
"""Of models that are to be loaded: whatever they hold before is nowhere in the checkpoint."""


@contextlib.contextmanager
def built_as(architecture: str) -> Iterator[None]:
    """While engines are built: freeze and register what the architecture asks for."""
    if architecture != FROZEN:
        yield
        return
    from harness.engine import build, stages

    def frozen(plan: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(plan, *args, **kwargs)
        for name in FROZEN_WEIGHTS:
            model.get_parameter(name).requires_grad_(False)
        for name, value in BUFFERS.items():
            blank = plan.config.train.seed == BLANK_SEED
            model.model.layers[1].register_buffer(name, value * 0 if blank else value.clone())
        return model

    original = build.empty_model
    with (
        mock.patch.object(build, "empty_model", frozen),
        mock.patch.object(stages, "empty_model", frozen),
    ):
        yield
