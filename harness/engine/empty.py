"""The model that a plan names, without its weights, checked against what the run asks of it."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from harness.errors import ConfigError
from harness.layout.attentions import ATTENTIONS
from harness.models.skeleton import DTYPES, hf_config, separates_documents, skeleton
from harness.plan.plan import Plan


def empty_model(
    plan: Plan, trust_remote_code: bool, document_mask: bool = False
) -> PreTrainedModel:
    """The skeleton of the plan's model, in the run's precision.

    Raises ConfigError for a model or an attention that transformers refuses or cannot build, and
    for one that would ignore document boundaries.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # else every default is logged twice
    # A model config's values reach all of transformers, which may raise anything.
    try:
        config = hf_config(plan.model_config, plan.model_source, trust_remote_code)
    except Exception as error:
        raise ConfigError(_unbuildable(plan, error)) from error
    try:
        model = skeleton(
            config, DTYPES[plan.precision], plan.config.model.attention, trust_remote_code
        )
    except ValueError as error:  # an attention implementation that the architecture lacks
        raise ConfigError(f"model.attention={plan.config.model.attention}: {error}") from error
    except Exception as error:
        raise ConfigError(_unbuildable(plan, error)) from error
    if document_mask:
        _require_document_mask(plan, model)
    return model


def _unbuildable(plan: Plan, error: Exception) -> str:
    """Return transformers' words about the model, and the keys that they may be about."""
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    problem = f"model.name={plan.config.model.name}: transformers cannot build it: {reason}"
    if overrides := plan.config.model.overrides:
        problem += f" (model.overrides: {', '.join(overrides)})"
    return problem


def _require_document_mask(plan: Plan, skeleton: PreTrainedModel) -> None:
    """Refuse to train across document boundaries where they were to be kept."""
    model, attention = plan.config.model, plan.config.model.attention
    rule = "tokens attend only within their document (data.document_mask, the default with prompts)"
    if not separates_documents(skeleton):
        raise ConfigError(
            f"model.name={model.name}: {plan.model_config['model_type']} models ignore document "
            f"boundaries, but {rule}: set data.document_mask=false, or take another model"
        )
    sequences = plan.micro_batch * plan.curriculum.most_pieces
    if ATTENTIONS[attention].masks_one_sequence and sequences > 1:
        raise ConfigError(
            f"model.attention={attention} heeds document boundaries in micro-batches of one "
            f"sequence only, and {rule}: set train.micro_batch=1 without ramp.length_from, or "
            "model.attention=sdpa"
        )
