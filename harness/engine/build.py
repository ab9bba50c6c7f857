"""From a Plan to an engine: the model built, partitioned and handed to DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import PreTrainedModel

from harness.config.ds_keys import offloaded_to
from harness.engine import operators, swap
from harness.engine.adapters import adapt
from harness.engine.allocators import set_allocators
from harness.engine.deepspeed_0_19.experts import expert_groups
from harness.engine.deepspeed_0_19.internals import inner_optimizer
from harness.engine.deepspeed_0_19.pipe_module import StageModule
from harness.engine.empty import empty_model
from harness.engine.expert import Experts
from harness.engine.float32 import float32_products
from harness.engine.groups import Groups, ModelParallelUnit, make_groups
from harness.engine.matrices import Matrices
from harness.engine.optimizers import Orthogonalizing, our_optimizer
from harness.engine.parts import cutter, note_copies
from harness.engine.pipeline import PipelineEngine
from harness.engine.processes import raise_together, share_cores
from harness.engine.stages import build_stage
from harness.engine.tensor import divide_forward
from harness.engine.whole import build_whole
from harness.engine.zero import ZeroEngine
from harness.errors import ConfigError
from harness.layout.optimizer_table import Parameter, is_frozen, optimizer_groups
from harness.layout.recompute import REVERSIBLE
from harness.layout.share import Purpose
from harness.layout.tensor import TensorPlan
from harness.models.chunked_loss import ChunkedLoss
from harness.models.depth import drop_layers
from harness.models.kernels import use_liger
from harness.models.logits import Operations, operations_on_logits
from harness.models.pieces import decoder_layers
from harness.models.quantized import quantize_linear_maps
from harness.models.recompute import checkpoint_layers
from harness.models.reversible import reverse_layers
from harness.models.skeleton import described_parameters
from harness.models.tiles import tile_mlps
from harness.plan.machine import missing_for_cpu_adam
from harness.plan.plan import Plan


def build_engine(
    plan: Plan,
    device: torch.device,
    trust_remote_code: bool = False,
    document_mask: bool = False,
    blank: bool = False,
    padded: bool = False,
) -> ZeroEngine:
    """Build the model that `plan` names and hand it to DeepSpeed.

    Under ZeRO-3 no rank ever holds more than one decoder layer in full, under pipeline stages no
    more than its stage. `document_mask`: batches will come with document boundaries, which the
    model must heed. `blank`: the weights come from a checkpoint, and are zeros until then.
    `padded`: batches will come with padding, which a mixture of experts does not balance.
    Raises ConfigError where the model or its weights do not fit the plan.
    """
    _compile_cpu_adam(plan)
    config, settings = swap.own_folder(plan.deepspeed)
    if plan.world.accelerator == "cuda":
        settings += _set_up_gpu_node(plan)
    empty = empty_model(plan, trust_remote_code, document_mask)
    parameters = described_parameters(empty)  # while its shapes are whole
    operations, notes = _operations_on_logits(plan, empty)
    stage, unit, experts, tensor_group, share = None, None, None, None, plan.share
    cut = cutter(share) if share.cutters else None
    if quantization := plan.config.model.lora.quantization:  # then nothing is divided
        cut = quantize_linear_maps(empty, quantization)
    if plan.grid.expert > 1:
        experts = Experts(plan)
        cut = cut and experts.marked(cut)
    row_group = None
    if plan.grid.sequence > 1:
        (row_group,) = make_groups(share, "sequence")
    if plan.stages is None:
        if plan.grid.tensor > 1:
            unit = ModelParallelUnit(Groups(share, make_groups(share, "tensor", "replicas")))
            tensor_group = unit.tensor_group
        model, events = build_whole(plan, empty, device, trust_remote_code, blank, unit, cut)
        handed: nn.Module = model
    else:
        stage, tied, events = build_stage(plan, empty, device, trust_remote_code, blank, cut)
        model, handed = stage.model, StageModule(stage, plan.grid, tied)
        tensor_group = handed.tensor_group if plan.grid.tensor > 1 else None
    if experts is not None:  # within what tensor-parallel ranks then add up
        experts.dispatch(model, device)
    if tensor_group is not None:
        divide_forward(model, TensorPlan.of(plan.model_config), share, tensor_group)
    parameters = adapt(model, plan) or parameters
    if rate := plan.config.model.stochastic_depth:
        for drawn in (model, *([empty] if stage else [])):
            drop_layers(drawn, rate)
    if plan.config.model.kernels == "liger":
        use_liger(model)
    _recompute(plan, model)
    if plan.config.model.compile:
        _compile_layers(model, plan.zero_stage)
    model.gets_padding = empty.gets_padding = padded  # type: ignore[assignment]
    note_copies(model, share)
    groups = _parameter_groups(plan, parameters, model)
    if experts is not None:
        groups = expert_groups(groups, plan.zero_stage)
    engine, *_ = deepspeed.initialize(
        model=handed,
        model_parameters=groups,
        optimizer=our_optimizer(plan),
        config=config,
        mpu=unit,
    )
    if operations is not None and (stage is None or stage.leave is None):
        chunked: Any = ChunkedLoss(model, plan.loss_chunk, operations)
        model.chunked_loss = chunked
    events = [*events, *settings, *notes]
    if stage is None:
        built = ZeroEngine(engine, plan, events, unit, experts, row_group)
        built.make_undivided = partial(empty_model, plan, trust_remote_code, document_mask)
    else:
        made = []
        if tensor_group:
            # With one data rank the tensor ranks are their whole stage: they have a group.
            purposes: tuple[Purpose, ...] = ("loss", "stage")
            others = (p for p in purposes if share.ranks(p) != share.ranks("tensor"))
            made = make_groups(share, *others)
        built = PipelineEngine(engine, plan, events, stage, empty, made)
    if isinstance(inner := inner_optimizer(engine), Orthogonalizing):
        names = {name for group in groups if group["muon"] for name in group["names"]}
        inner.matrices = Matrices(engine, model, names, built.data_group)
    return built


def _operations_on_logits(
    plan: Plan, empty: PreTrainedModel
) -> tuple[Operations | None, list[dict[str, Any]]]:
    """Return what the loss in chunks has to know of a model, and events; None without chunks."""
    if not plan.loss_chunk:
        return None, []
    try:
        return operations_on_logits(empty), []
    except ValueError as error:
        message = f"the loss holds all logits of a micro-batch (model.loss_chunk): {error}"
        return None, [{"kind": "loss_not_chunked", "message": message}]


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


def _compile_layers(model: PreTrainedModel, zero_stage: int) -> None:
    """Compile every decoder layer for itself: alike, they are compiled once, and fast.

    Under ZeRO-3 a layer is gathered as a whole then: hooks on the modules in it would break it into
    two dozen graphs.
    """
    _, layers = decoder_layers(model)
    if zero_stage == 3:
        set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def _parameter_groups(
    plan: Plan, parameters: list[Parameter], model: nn.Module
) -> list[dict[str, Any]]:
    """Return the optimizer groups of this rank's share of the whole model's `parameters`."""
    optim = plan.config.optim
    for name, p in model.named_parameters():
        if is_frozen(name, optim.groups):
            p.requires_grad_(False)
    # A pipeline's last stage has a copy of a tied embedding as its head: stepped as the first is.
    by_name = {
        getattr(p, "tied_to", name): p for name, p in model.named_parameters() if p.requires_grad
    }
    groups = optimizer_groups(
        (parameter for parameter in parameters if parameter.name in by_name),
        optim.weight_decay,
        optim.groups,
        muon=optim.name == "muon",
    )
    return [
        {
            "params": [by_name[name] for name in names],
            "names": names,
            "lr": optim.lr * group.lr_multiplier,
            **asdict(group),
        }
        for group, names in groups
    ]


def _set_up_gpu_node(plan: Plan) -> list[dict[str, Any]]:
    """Set torch's allocators, and the threads of an optimizer on the host. Collective."""
    events = [set_allocators(plan.world)]
    if plan.precision == "fp32":
        events.append(float32_products())
    if offloaded_to(plan.deepspeed, "optimizer") != "none":
        threads = share_cores(plan.world)
        message = f"the optimizer steps on the host, with {threads} threads on rank 0"
        events.append({"kind": "threads", "message": message})
    return events


def _compile_cpu_adam(plan: Plan) -> None:
    """Compile DeepSpeed's CPU Adam before the model is built, if the plan steps with it; nothing
    else is compiled. Collective. Raises ConfigError if that fails on any rank.
    """
    optimizer = plan.deepspeed["optimizer"]
    if optimizer["type"] in ("Adam", "AdamW") and "torch_adam" not in optimizer["params"]:
        raise_together(_offload_problem(missing_for_cpu_adam()))


def _offload_problem(missing: str | None) -> str | None:
    """Return why CPU Adam, which is compiled here, cannot step on this rank; else None."""
    needs = "zero_optimization.offload_optimizer needs DeepSpeed's compiled CPU Adam"
    if missing is not None:
        return (
            f"{needs}, but {missing}; install a C++ compiler and ninja (apt install g++ "
            "ninja-build), or remove offload_optimizer"
        )
    problem = operators.problem_of("CPUAdamBuilder")
    return problem and f"{needs}: {problem}"
