"""From a Plan to an engine: the model built, partitioned and handed to DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import PreTrainedModel

from harness.config.ds_keys import offloaded_to
from harness.engine import operators, swap
from harness.engine.deepspeed_0_19.internals import inner_optimizer
from harness.engine.deepspeed_0_19.pipe_module import StageModule
from harness.engine.empty import empty_model
from harness.engine.matrices import Matrices
from harness.engine.optimizers import Orthogonalizing, our_optimizer
from harness.engine.parts import note_copies
from harness.engine.pipeline import PipelineEngine
from harness.engine.processes import raise_together
from harness.engine.stages import build_stage
from harness.engine.whole import build_whole
from harness.engine.zero import ZeroEngine
from harness.layout.optimizer_table import Parameter, optimizer_groups
from harness.models.depth import drop_layers
from harness.models.kernels import use_liger
from harness.models.pieces import decoder_layers
from harness.models.skeleton import described_parameters
from harness.plan.machine import missing_for_adam
from harness.plan.plan import Plan


def build_engine(
    plan: Plan,
    device: torch.device,
    trust_remote_code: bool = False,
    document_mask: bool = False,
    blank: bool = False,
) -> ZeroEngine:
    """Build the model that `plan` names and hand it to DeepSpeed.

    Under ZeRO-3 no rank ever holds more than one decoder layer in full, under pipeline stages no
    more than its stage. `document_mask`: batches will come with document boundaries, which the
    model must heed. `blank`: the weights come from a checkpoint, and are zeros until then.
    Raises ConfigError where the model or its weights do not fit the plan.
    """
    _compile_adam(plan)
    config, settings = swap.own_folder(plan.deepspeed)
    empty = empty_model(plan, trust_remote_code, document_mask)
    parameters = described_parameters(empty)  # while its shapes are whole
    stage = None
    if plan.stages is None:
        model, events = build_whole(plan, empty, device, trust_remote_code, blank)
        handed: nn.Module = model
    else:
        stage, tied, events = build_stage(plan, empty, device, trust_remote_code, blank)
        model, handed = stage.model, StageModule(stage, plan.grid.pipeline, tied)
    if rate := plan.config.model.stochastic_depth:
        for drawn in (model, *([empty] if stage else [])):
            drop_layers(drawn, rate)
    if plan.config.model.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if plan.config.model.kernels == "liger":
        use_liger(model)
    if plan.config.model.compile:
        _compile_layers(model, plan.zero_stage)
    note_copies(model, plan.share)
    groups = _parameter_groups(plan, parameters, model)
    engine, *_ = deepspeed.initialize(
        model=handed,
        model_parameters=groups,
        optimizer=our_optimizer(plan),
        config=config,
    )
    events = [*events, *settings]
    if stage is None:
        built = ZeroEngine(engine, plan, events)
    else:
        built = PipelineEngine(engine, plan, events, stage, empty)
    if isinstance(inner := inner_optimizer(engine), Orthogonalizing):
        names = {name for group in groups if group["muon"] for name in group["names"]}
        inner.matrices = Matrices(engine, model, names, built.data_group)
    return built


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


def _compile_adam(plan: Plan) -> None:
    """Compile DeepSpeed's Adam before the model is built, if the plan steps with it. Collective.

    Raises ConfigError if that fails on any rank; the plan has taken torch's Adam where it can.
    """
    optimizer = plan.deepspeed["optimizer"]
    if optimizer["type"] not in ("Adam", "AdamW") or "torch_adam" in optimizer["params"]:
        return
    if offloaded_to(plan.deepspeed, "optimizer") == "none":
        raise_together(operators.problem_of("FusedAdamBuilder"))
    else:
        raise_together(_offload_problem(missing_for_adam("cpu")))


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
