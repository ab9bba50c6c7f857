"""Adapters in the model that DeepSpeed is handed, partitioned as its weights are."""

from __future__ import annotations

from transformers import PreTrainedModel

from harness.engine.deepspeed_0_19 import internals
from harness.engine.parts import note_given
from harness.layout.optimizer_table import Parameter
from harness.models.adapters import add_adapters
from harness.plan.plan import Plan


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
