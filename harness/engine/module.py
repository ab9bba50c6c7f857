"""The module that a rank trains: the whole model or a pipeline stage, with its slices of the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from harness.engine.deepspeed_0_19.pipe_module import StageModule
from harness.engine.expert import Experts
from harness.engine.fragments import cutter
from harness.engine.groups import Groups, ModelParallelUnit, make_groups
from harness.engine.single_stage import build_single_stage
from harness.engine.stages import build_stage
from harness.engine.tensor import divide_forward
from harness.layout.tensor import TensorPlan
from harness.models.adapters import quantize_linear_maps
from harness.models.stage import Stage
from harness.plan.plan import Plan


@dataclass(frozen=True)
class Module:
    """A model with weights, and the groups of ranks that share it."""

    model: PreTrainedModel
    wrapped: nn.Module
    """The module passed to DeepSpeed: the model, or a pipeline stage that wraps its layers."""
    events: list[dict[str, Any]]
    stage: Stage | None
    unit: ModelParallelUnit | None
    experts: Experts | None
    row_group: dist.ProcessGroup | None


def build_module(
    plan: Plan, empty: PreTrainedModel, device: torch.device, trust_remote_code: bool, blank: bool
) -> Module:
    """Load or initialise the weights of `empty`, or of a stage of it, on `device`; zeros if
    `blank`. Collective. Raises ConfigError if the model or its weights do not fit the plan.
    """
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
    if tensor_group is not None:
        divide_forward(model, TensorPlan.of(plan.model_config), share, tensor_group)
    return Module(model, wrapped, events, stage, unit, experts, row_group)
