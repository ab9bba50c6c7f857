"""Changes of a model's layers: adapters, left out, fused, computed again, compiled."""

from __future__ import annotations

import torch
from deepspeed.utils import set_z3_leaf_module, set_z3_leaf_modules
from transformers import PreTrainedModel

from harness.engine.deepspeed_0_19 import internals
from harness.engine.fragments import note_given
from harness.errors import ConfigError
from harness.layout.optimizer_table import Parameter
from harness.layout.recompute import REVERSIBLE
from harness.models.adapters import add_adapters
from harness.models.layer_changes import drop_layers, tile_mlps, use_liger
from harness.models.pieces import decoder_layers
from harness.models.recompute import checkpoint_layers
from harness.models.reversible import reverse_layers
from harness.plan.memory import gathers_layers
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
    as_a_whole = gathers_layers(plan)
    _recompute(plan, model, as_a_whole)
    _, layers = decoder_layers(model)
    if as_a_whole:
        for layer in layers:
            set_z3_leaf_module(layer, True)
    if plan.config.model.compile:
        for layer in layers:  # each for itself: alike, they are compiled once
            layer.forward = torch.compile(layer.forward)


def _recompute(plan: Plan, model: PreTrainedModel, as_a_whole: bool) -> None:
    """Let layers and MLPs compute again, for their backward pass, what they do not keep.

    Under ZeRO-3 an MLP in tiles is gathered as a whole, if not its layer: hooks on the modules in
    it would gather every weight once for each tile.
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
        if plan.zero_stage == 3 and not as_a_whole:
            set_z3_leaf_modules(model, list(mlps))


def adapt(model: PreTrainedModel, plan: Plan, parameters: list[Parameter]) -> list[Parameter]:
    """Put the plan's adapters into a model, in place, and freeze the rest; return what decides the
    optimizer groups of all that is trained: the model's `parameters` without adapters. Collective.
    """
    lora = plan.config.model.lora
    if lora.rank is None:
        return parameters
    trained = add_adapters(model, lora, plan.config.train.seed, parameters)
    note_given(model)
    partitioned = [p for p in model.parameters() if internals.is_partitioned(p)]
    if partitioned:
        made = [p for p in model.parameters() if not internals.is_partitioned(p)]
        internals.partition_like(partitioned[0], [p for p in made if p.requires_grad])
    return trained
