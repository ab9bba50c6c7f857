"""Changes to a model's layers: adapters, kernels, recomputation, compilation."""

from typing import Any

import torch
from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_module, set_z3_leaf_modules
from torch import nn
from transformers import PreTrainedModel

from harness.engine.deepspeed_0_19 import internals
from harness.engine.fragments import mark_frozen_base
from harness.errors import ConfigError
from harness.layout.optimizer_table import Parameter
from harness.layout.recompute import REVERSIBLE
from harness.models.adapters import add_adapters
from harness.models.float8 import use_float8
from harness.models.layer_changes import drop_layers, tile_mlps, use_liger
from harness.models.recompute import checkpoint_layers
from harness.models.reversible import reverse_layers
from harness.models.units import decoder_layers, loops_over_experts
from harness.plan.memory import gathers_layers
from harness.plan.plan import Plan


def change_layers(plan: Plan, model: PreTrainedModel, whole: PreTrainedModel | None) -> None:
    """Change the layers of `model`, and of the empty full model `whole` of a pipeline stage. Raises
    ConfigError for an MLP that cannot be tiled.

    Under ZeRO-3, experts that are separate modules are gathered as one unit. Each rank calls only
    those that its tokens chose, so gathering them one by one would make collectives differ between
    ranks.
    """
    if rate := plan.config.model.stochastic_depth:
        for drawn in (model, *([whole] if whole is not None else [])):
            drop_layers(drawn, rate)
    if plan.config.model.kernels == "liger":
        use_liger(model)
    if plan.config.model.float8 != "none":
        emulate, compiled = plan.world.accelerator == "cpu", plan.config.model.compile is True
        try:
            use_float8(model, plan.config.model.float8, emulate, compiled)
        except ValueError as error:
            raise ConfigError(
                f"model.float8={plan.config.model.float8}: {error}: use none"
            ) from error
    as_a_whole = gathers_layers(plan)
    _recompute(plan, model, as_a_whole)
    _, layers = decoder_layers(model)
    if as_a_whole:
        for layer in layers:
            set_z3_leaf_module(layer, True)
    elif plan.zero_stage == 3:
        for module in loops_over_experts(model):
            set_z3_leaf_module(module, True)
    if plan.config.model.compile:
        for layer in layers:  # layer by layer: identical layers share one compilation
            layer.forward = torch.compile(layer.forward)


def start_gradients_at_leaves(model: nn.Module) -> None:
    """Give the first trained leaf module an input that requires a gradient, if weights are frozen.

    DeepSpeed reduces the gradients of a leaf module's weights once that of its input is computed. A
    module whose input depends on no trained weight would lose its weights in the middle of its
    backward pass. Call this after DeepSpeed has set its own leaf modules.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    for leaf in get_z3_leaf_modules(model):
        if any(parameter.requires_grad for parameter in leaf.parameters()):
            leaf.register_forward_pre_hook(_start_gradient, prepend=True)  # before DeepSpeed's


def _start_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Make the first input, the hidden states, require a gradient."""
    hidden, *others = inputs
    if hidden.requires_grad or not torch.is_grad_enabled():
        return None
    return (hidden.detach().requires_grad_(), *others)


def _recompute(plan: Plan, model: PreTrainedModel, as_a_whole: bool) -> None:
    """Set up recomputation of layers and MLPs in the backward pass.

    Under ZeRO-3, a tiled MLP is gathered as one unit unless its layer is: hooks on its submodules
    would gather every weight once per tile.
    """
    run = plan.config.model
    if plan.checkpointing == REVERSIBLE:
        reverse_layers(model)
    else:
        checkpoint_layers(model, run.checkpointing, run.activation_offload, run.compile is True)
    if run.mlp_tiles > 1:
        try:
            mlps = tile_mlps(model, run.mlp_tiles)
        except ValueError as error:
            raise ConfigError(f"model.mlp_tiles={run.mlp_tiles}: {error}: use 1") from error
        if plan.zero_stage == 3 and not as_a_whole:
            set_z3_leaf_modules(model, list(mlps))


def adapt(model: PreTrainedModel, plan: Plan, parameters: list[Parameter]) -> list[Parameter]:
    """Add the plan's adapters to a model, in place, and freeze the rest. Return the parameters to
    train; the model's `parameters` if there are no adapters. Collective.
    """
    lora = plan.config.model.lora
    if lora.rank is None:
        return parameters
    trained = add_adapters(model, lora, plan.config.train.seed, parameters)
    mark_frozen_base(model)
    partitioned = [p for p in model.parameters() if internals.is_partitioned(p)]
    if partitioned:
        made = [p for p in model.parameters() if not internals.is_partitioned(p)]
        internals.partition_like(partitioned[0], [p for p in made if p.requires_grad])
    return trained
