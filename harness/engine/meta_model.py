"""The plan's model without weights (on meta), checked against the run's requirements."""

import logging

from transformers import PreTrainedModel

from harness.errors import ConfigError
from harness.layout.attention_table import ATTENTIONS
from harness.models.attention import register_own, separates_documents, takes_keywords
from harness.models.efficient_attention.kinds import function_name
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.plan.attention import ignored_documents
from harness.plan.plan import Plan


def empty_model(
    plan: Plan, trust_remote_code: bool, document_mask: bool = False
) -> PreTrainedModel:
    """Return the plan's model on meta, in the run's precision.

    Raises ConfigError for a model or attention that transformers rejects or cannot build, and for a
    model that would ignore document boundaries.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it logs every default twice
    # The values of a model config are used all over transformers, which may raise anything.
    try:
        config = hf_config(plan.model_config, plan.model_source, trust_remote_code)
    except Exception as error:
        raise ConfigError(_unbuildable(plan, error)) from error
    try:
        model = skeleton(config, DTYPES[plan.precision], attention_of(plan), trust_remote_code)
    except ValueError as error:  # the architecture lacks this attention implementation
        raise ConfigError(f"model.attention={plan.config.model.attention}: {error}") from error
    except Exception as error:
        raise ConfigError(_unbuildable(plan, error)) from error
    attention = plan.config.model.attention
    row = ATTENTIONS[attention]
    if row.takes_bounds and not takes_keywords(model, weights=row.package is not None):
        raise ConfigError(
            f"model.attention={attention}: {plan.model_config['model_type']} models do not pass "
            "document boundaries to their attention: use sdpa or eager"
        )
    # data.batching other than packed has one document in each window.
    is_packed = plan.config.data.batching == "packed"
    if document_mask and is_packed and not separates_documents(model):
        raise ConfigError(ignored_documents(plan))
    if plan.grid.sequence > 1 and not takes_keywords(model):
        raise ConfigError(
            f"sequence_parallel_size is {plan.grid.sequence}: sequence parallelism does not "
            f"support the attention of {plan.model_config['model_type']} models: use 1"
        )
    return model


def attention_of(plan: Plan) -> str:
    """Return the name under which transformers knows a plan's attention."""
    model = plan.config.model
    register_own(model.attention, plan.config.own.given)
    return function_name(model.attention, model.attention_sizes, plan.config.train.seed)


def _unbuildable(plan: Plan, error: Exception) -> str:
    """Return transformers' error about the model, with the config keys that may have caused it."""
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    problem = f"model.name={plan.config.model.name}: transformers cannot build it: {reason}"
    if overrides := plan.config.model.overrides:
        problem += f" (model.overrides: {', '.join(overrides)})"
    return problem
