"""From a Plan to an engine: the model built, partitioned and handed to DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from harness.config.ds_json import offloaded_to
from harness.engine import operators, swap
from harness.engine.allocators import set_allocators
from harness.engine.deepspeed_0_19.experts import expert_groups
from harness.engine.deepspeed_0_19.internals import inner_optimizer
from harness.engine.empty import empty_model
from harness.engine.fragments import note_copies
from harness.engine.groups import make_groups
from harness.engine.layers import adapt, change_layers
from harness.engine.module import build_module
from harness.engine.optimizers import Matrices, Orthogonalizing, our_optimizer
from harness.engine.pipeline import PipelineEngine
from harness.engine.processes import raise_together, share_cores
from harness.engine.zero import ZeroEngine
from harness.layout.grid import Purpose, Share
from harness.layout.optimizer_table import Parameter, is_frozen, optimizer_groups
from harness.models.chunked_loss import ChunkedLoss
from harness.models.logits import Operations, operations_on_logits
from harness.models.skeleton import described_parameters
from harness.plan.machine import missing_for_cpu_adam
from harness.plan.plan import Plan

_KEY = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


def float32_products() -> dict[str, Any]:
    """Return the event that says in what products of fp32 are computed; nothing is changed."""
    if torch.get_float32_matmul_precision() == "highest":
        message = f"products of fp32 are computed in fp32; {_KEY}=1 in the environment takes TF32"
    else:
        message = f"products of fp32 are rounded to TF32 ({_KEY}, or this program's own setting)"
    return {"kind": "float32_products", "message": message}


def build_engine(
    plan: Plan,
    device: torch.device,
    trust_remote_code: bool = False,
    document_mask: bool = False,
    blank: bool = False,
    padded: bool = False,
) -> ZeroEngine:
    """Build the model that `plan` names and hand it to DeepSpeed.

    Under ZeRO-3 no rank ever holds more than two decoder layers in full, the one that it drew and
    the one that it receives; under pipeline stages no more than its stage. `document_mask`:
    batches will come with document boundaries, which the model must heed. `blank`: the weights
    come from a checkpoint, and are zeros until then. `padded`: batches will come with padding,
    which a mixture of experts does not balance.
    Raises ConfigError where the model or its weights do not fit the plan.
    """
    _compile_cpu_adam(plan)
    config, settings = swap.own_folder(plan.deepspeed)
    settings.append(set_allocators(plan.world))
    if plan.world.accelerator == "cuda":
        settings += _set_up_gpu_node(plan)
    empty = empty_model(plan, trust_remote_code, document_mask)
    parameters = described_parameters(empty)  # while its shapes are whole
    operations, notes = _operations_on_logits(plan, empty)
    module = build_module(plan, empty, device, trust_remote_code, blank)
    model, stage = module.model, module.stage
    parameters = adapt(model, plan, parameters)
    change_layers(plan, model, empty if stage else None)
    model.gets_padding = empty.gets_padding = padded  # type: ignore[assignment]
    note_copies(model, plan.share)
    groups = _parameter_groups(plan, parameters, model)
    if module.experts is not None:
        groups = expert_groups(groups, plan.zero_stage)
    engine, *_ = deepspeed.initialize(
        model=module.handed,
        model_parameters=groups,
        optimizer=our_optimizer(plan),
        config=config,
        mpu=module.unit,
    )
    if operations is not None and (stage is None or stage.leave is None):
        chunked: Any = ChunkedLoss(model, plan.loss_chunk, operations)
        model.chunked_loss = chunked
    events = [*module.events, *settings, *notes]
    if stage is None:
        built = ZeroEngine(engine, plan, events, module.unit, module.experts, module.row_group)
        built.make_undivided = partial(empty_model, plan, trust_remote_code, document_mask)
    else:
        made = _groups_of_a_stage(plan.share) if module.tensor_group else []
        built = PipelineEngine(engine, plan, events, stage, empty, made)
    if isinstance(inner := inner_optimizer(engine), Orthogonalizing):
        names = {name for group in groups if group["muon"] for name in group["names"]}
        inner.matrices = Matrices(engine, model, names, built.data_group)
    return built


def _groups_of_a_stage(share: Share) -> list[dist.ProcessGroup]:
    """Make the groups of tensor-parallel stages that DeepSpeed does not make. Collective.

    With one data rank the tensor ranks are their whole stage, and have a group.
    """
    purposes: tuple[Purpose, ...] = ("loss", "stage")
    others = (p for p in purposes if share.ranks(p) != share.ranks("tensor"))
    return make_groups(share, *others)


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
    """Set products of fp32 matrices, and the threads of an optimizer on the host. Collective."""
    events = []
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
