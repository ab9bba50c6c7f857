"""Changes of a model's layers that a plan asks for: left out, fused, computed again, compiled."""

from __future__ import annotations

import torch
from deepspeed.utils import set_z3_leaf_modules
from transformers import PreTrainedModel

from harness.errors import ConfigError
from harness.layout.recompute import REVERSIBLE
from harness.models.depth import drop_layers
from harness.models.kernels import use_liger
from harness.models.pieces import decoder_layers
from harness.models.recompute import checkpoint_layers
from harness.models.reversible import reverse_layers
from harness.models.tiles import tile_mlps
from harness.plan.plan import Plan


def change_layers(plan: Plan, model: PreTrainedModel, whole: PreTrainedModel | None) -> None:
    """Change the layers of `model`. `whole`: the empty model that a stage is of, whose layers are
    left out at the same rate. Raises ConfigError for an MLP that cannot be tiled.
    """
    if rate := plan.config.model.stochastic_depth:
        for drawn in (model, *([whole] if whole is not None else [])):
            drop_layers(drawn, rate)
    if plan.config.model.kernels == "liger":
        use_liger(model)
    _recompute(plan, model)
    if plan.config.model.compile:
        _compile(model, plan.zero_stage)


def _recompute(plan: Plan, model: PreTrainedModel) -> None:
    """Let layers and MLPs compute again, for their backward pass, what they do not keep.

    Under ZeRO-3 an MLP in tiles is gathered as a whole: hooks on the modules in it would gather
    every weight once for each tile.
    """
    run = plan.config.model
    if plan.checkpointing == REVERSIBLE:
        reverse_layers(model)
    else:
        checkpoint_layers(model, run.checkpointing, run.activation_offload)
    if run.mlp_tiles > 1:
        try:
            mlps = tile_mlps(model, run.mlp_tiles)
        except ValueError as error:
            raise ConfigError(f"model.mlp_tiles={run.mlp_tiles}: {error}: use 1") from error
        if plan.zero_stage == 3:
            set_z3_leaf_modules(model, list(mlps))


def _compile(model: PreTrainedModel, zero_stage: int) -> None:
    """Compile every decoder layer for itself: alike, they are compiled once, and fast.

    Under ZeRO-3 a layer is gathered as a whole then: hooks on the modules in it would break it into
    two dozen graphs.
    """
    _, layers = decoder_layers(model)
    if zero_stage == 3:
        set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
