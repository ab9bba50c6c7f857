"""Builds the engine of a plan: builds the model, partitions it and hands it to DeepSpeed."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import PreTrainedModel

from harness.config.ds_json import offloaded_to
from harness.engine import swap
from harness.engine.allocators import set_allocators
from harness.engine.deepspeed_0_19 import internals
from harness.engine.deepspeed_0_19.experts import expert_groups
from harness.engine.deepspeed_0_19.pipe_module import StageModule
from harness.engine.expert import Experts
from harness.engine.fragments import cutter, note_copies
from harness.engine.groups import Groups, ModelParallelUnit, make_groups
from harness.engine.layers import adapt, change_layers, start_gradients_at_leaves
from harness.engine.meta_model import empty_model
from harness.engine.optimizers import Matrices, Orthogonalizing, our_optimizer
from harness.engine.pipeline import PipelineEngine
from harness.engine.processes import raise_together, share_cores
from harness.engine.single_stage import build_single_stage
from harness.engine.stages import build_stage
from harness.engine.tensor import Divided, divide_forward
from harness.engine.zero import ZeroEngine
from harness.errors import ConfigError
from harness.layout.grid import Purpose
from harness.layout.optimizer_table import Parameter, is_frozen, optimizer_groups
from harness.layout.tensor import TensorPlan
from harness.models.adapters import quantize_linear_maps
from harness.models.chunked_loss import ChunkedLoss, Operations, operations_on_logits
from harness.models.loss import LossSetup, own_loss
from harness.models.preferences import TALLIED, Preferences
from harness.models.sequence import DividedRows
from harness.models.skeleton import described_parameters
from harness.models.stage import Stage
from harness.plan.machine import missing_for_cpu_adam
from harness.plan.plan import Plan

_KEY = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


def float32_products() -> dict[str, Any]:
    """Return the event that reports the precision of fp32 matrix products. Changes nothing."""
    if torch.get_float32_matmul_precision() == "highest":
        message = f"fp32 matrix products run in fp32; set {_KEY}=1 in the environment for TF32"
    else:
        message = f"fp32 matrix products run in TF32 ({_KEY}, or a setting of this program)"
    return {"kind": "float32_products", "message": message}


def build_engine(
    plan: Plan,
    device: torch.device,
    trust_remote_code: bool = False,
    document_mask: bool = False,
    blank: bool = False,
    padded: bool = False,
) -> ZeroEngine:
    """Build the model of a plan and hand it to DeepSpeed. Collective.

    Under ZeRO-3 no rank ever holds more than two full decoder layers (the one it initialises and
    the one it receives); with pipeline stages, no more than its stage. `document_mask`: batches
    will have document boundaries, which attention must respect. `blank`: weights are zeros until a
    checkpoint is loaded. `padded`: batches will contain padding, which the balancing loss of a
    mixture of experts must ignore.

    Raises ConfigError if the model or its weights do not fit the plan.
    """
    _compile_cpu_adam(plan)
    config, settings = swap.own_folder(plan.deepspeed)
    settings.append(set_allocators(plan.world))
    if plan.world.accelerator == "cuda":
        settings += _set_up_gpu_node(plan)
    empty = empty_model(plan, trust_remote_code, document_mask)
    parameters = described_parameters(empty)  # before its shapes are split
    operations, notes = _operations_on_logits(plan, empty)
    module = _build_module(plan, empty, device, trust_remote_code, blank)
    model, stage = module.model, module.stage
    constants = _constants(model) if plan.zero_stage < 3 else {}
    parameters = adapt(model, plan, parameters)
    if operations is not None and hasattr(model.get_output_embeddings(), "base_layer"):
        operations, notes = None, _not_chunked("an adapter is on the head")
    change_layers(plan, model, empty if stage else None)
    if module.divided.residuals is not None:
        module.divided.residuals.divide()
    note_copies(model, plan.share)
    groups = _parameter_groups(plan, parameters, model)
    if module.experts is not None:
        groups = expert_groups(groups, plan.zero_stage)
    engine, *_ = deepspeed.initialize(
        model=module.wrapped,
        model_parameters=groups,
        optimizer=our_optimizer(plan),
        config=config,
        mpu=module.unit,
    )
    if plan.zero_stage == 3:
        start_gradients_at_leaves(model)
    for parameter, values in constants.items():
        parameter.data = values
    chunked = None
    if operations is not None and (stage is None or stage.leave is None):
        chunked = ChunkedLoss(model, plan.loss_chunk, operations)
    rows = None if module.row_group is None else DividedRows(model, module.row_group)
    preferences = _preferences(plan, device, module.row_group)
    fuses_loss = plan.config.model.kernels == "liger" and preferences is None
    objectives = preferences, own_loss(plan)
    setup = LossSetup(module.divided.vocabulary, chunked, fuses_loss, padded, rows, *objectives)
    events = [*module.events, *settings, *notes]
    made = _made_groups(plan, engine, module)
    if stage is None:
        built = ZeroEngine(engine, plan, events, setup, made, module.experts)
        built.make_undivided = partial(empty_model, plan, trust_remote_code, document_mask)
    else:
        built = PipelineEngine(engine, plan, events, setup, made, stage, empty)
    if isinstance(inner := internals.inner_optimizer(engine), Orthogonalizing):
        names = {name for group in groups if group["muon"] for name in group["names"]}
        inner.matrices = Matrices(engine, model, names, built.data_group)
    return built


@dataclass(frozen=True)
class _Module:
    """A model with weights, and the groups of ranks that share it."""

    model: PreTrainedModel
    wrapped: nn.Module
    """The module passed to DeepSpeed: the model, or a pipeline stage that wraps its layers."""
    events: list[dict[str, Any]]
    stage: Stage | None
    unit: ModelParallelUnit | None
    experts: Experts | None
    row_group: dist.ProcessGroup | None
    divided: Divided


def _build_module(
    plan: Plan, empty: PreTrainedModel, device: torch.device, trust_remote_code: bool, blank: bool
) -> _Module:
    """Load or initialise the weights of `empty`, or of a stage of it. Collective."""
    share, grid = plan.share, plan.grid
    cut = cutter(share) if share.cutters else None
    if quantization := plan.config.model.lora.quantization:  # then no weight is sliced
        cut = quantize_linear_maps(empty, quantization)
    experts = Experts(plan) if grid.expert > 1 else None
    if experts is not None:
        cut = cut and experts.marked(cut)
    row_group, stage, unit, tensor_group = None, None, None, None
    if grid.sequence > 1:
        (row_group,) = make_groups(share, "sequence")
    if plan.stages is None:
        if grid.tensor > 1:
            unit = ModelParallelUnit(Groups(share, make_groups(share, "tensor", "replicas")))
            tensor_group = unit.tensor_group
        model, events = build_single_stage(plan, empty, device, trust_remote_code, blank, unit, cut)
        wrapped: nn.Module = model
    else:
        stage, tied, events = build_stage(plan, empty, device, trust_remote_code, blank, cut)
        model, wrapped = stage.model, StageModule(stage, grid, tied)
        tensor_group = wrapped.tensor_group if grid.tensor > 1 else None
    if experts is not None:  # first: the tensor-parallel wrapper sums its output
        experts.dispatch(model, device)
    divided = Divided()
    if tensor_group is not None:
        styles = TensorPlan.of(plan.model_config)
        divided = divide_forward(model, styles, share, tensor_group, plan.divides_residuals)
    return _Module(model, wrapped, events, stage, unit, experts, row_group, divided)


def _made_groups(plan: Plan, engine: Any, module: _Module) -> list[dist.ProcessGroup | None]:
    """Return the groups that were created for this rank. Create those of a tensor-parallel stage
    that DeepSpeed does not create. Collective.
    """
    made = [module.divided.sharing_a_head]
    if module.stage is not None:
        made += internals.made_groups(engine)
        purposes: tuple[Purpose, ...] = ("loss", "stage") if plan.grid.tensor > 1 else ()
        others = (p for p in purposes if plan.share.ranks(p) != plan.share.ranks("tensor"))
        return [*made, *make_groups(plan.share, *others)]
    unit, experts = module.unit, module.experts
    made += [unit.tensor_group, unit.data_group] if unit else []
    made += [experts.parts, experts.group, experts.replicas] if experts else []
    return [*made, module.row_group]


def _preferences(
    plan: Plan, device: torch.device, row_group: dist.ProcessGroup | None
) -> Preferences | None:
    train = plan.config.train
    if not train.preferences:
        return None
    settings = train.objective, train.beta_used, train.margin_used, train.sft_weight
    tallies = torch.zeros(2, 1 + len(TALLIED), dtype=torch.float64, device=device)
    return Preferences(*settings, tallies, row_group)


def _operations_on_logits(
    plan: Plan, empty: PreTrainedModel
) -> tuple[Operations | None, list[dict[str, Any]]]:
    """Return a chunked loss's operations on logits (None: not chunked), and events."""
    if not plan.loss_chunk:
        return None, []
    try:
        return operations_on_logits(empty), []
    except ValueError as error:
        return None, _not_chunked(str(error))


def _not_chunked(why: str) -> list[dict[str, Any]]:
    message = f"the loss is not chunked (model.loss_chunk): {why}"
    return [{"kind": "loss_not_chunked", "message": message}]


def _constants(model: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """Return the fp32 values of parameters that the model itself freezes, such as the biases of
    routers. They stay fp32 in any precision; DeepSpeed casts all parameters except under ZeRO-3.
    """
    frozen = (p for p in model.parameters() if not p.requires_grad)
    return {p: p.data for p in frozen if p.dtype == torch.float32}


def _parameter_groups(
    plan: Plan, parameters: list[Parameter], model: nn.Module
) -> list[dict[str, Any]]:
    """Return the optimizer groups, with this rank's shards of the model's `parameters`."""
    optim = plan.config.optim
    for name, p in model.named_parameters():
        if is_frozen(name, optim.groups):
            p.requires_grad_(False)
    # The head of the last pipeline stage is a copy of the tied embedding and shares its settings.
    by_name = {
        getattr(p, "tied_to", name): p for name, p in model.named_parameters() if p.requires_grad
    }
    groups = optimizer_groups(
        (parameter for parameter in parameters if parameter.name in by_name),
        optim.weight_decay,
        optim.groups,
        muon=optim.name == "muon",
        adam_rate=(optim.adam_lr or optim.lr) / optim.lr,
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
    """Report the precision of fp32 products, and set the threads of a CPU optimizer. Collective."""
    events = []
    if plan.precision == "fp32":
        events.append(float32_products())
    if offloaded_to(plan.deepspeed, "optimizer") != "none":
        threads = share_cores(plan.world)
        message = f"the optimizer runs on the CPU, with {threads} threads on rank 0"
        events.append({"kind": "threads", "message": message})
    return events


def _compile_cpu_adam(plan: Plan) -> None:
    """Compile DeepSpeed's CPU Adam, if the plan uses it. Raises ConfigError. Collective."""
    optimizer = plan.deepspeed["optimizer"]
    if optimizer["type"] in ("Adam", "AdamW") and "torch_adam" not in optimizer["params"]:
        raise_together(_offload_problem(missing_for_cpu_adam()))


def _offload_problem(missing: str | None) -> str | None:
    """Compile CPU Adam; return the problem if that fails or a tool is `missing`, otherwise None."""
    needs = "zero_optimization.offload_optimizer needs DeepSpeed's compiled CPU Adam"
    if missing is not None:
        return (
            f"{needs}, but {missing}; install a C++ compiler and ninja (apt install g++ "
            "ninja-build), or remove offload_optimizer"
        )
    try:
        get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
    except (ConfigError, RuntimeError) as error:  # RuntimeError: tools are missing
        return f"{needs}: {error}"
    return None
