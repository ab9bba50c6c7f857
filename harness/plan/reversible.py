"""Reversible layers in a plan: their requirements."""

from __future__ import annotations

from collections.abc import Iterator

from harness.layout.families import FAMILIES, family_of
from harness.layout.recompute import REVERSIBLE
from harness.plan.draft import Draft
from harness.plan.pipeline import num_stages

REVERSIBLE_FAMILIES = tuple(name for name, each in FAMILIES.items() if "halves" in each.compared)
"""Families whose layers are two additions, of attention and of an MLP."""


def check_reversible(draft: Draft) -> None:
    """Refuse reversible layers in other families, and beside what they do not go with."""
    if not draft.model_config.get(REVERSIBLE):
        return
    for why, use in _obstacles(draft):
        draft.problems.add("model.reversible", why, use)


def _obstacles(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield each reason and its remedy."""
    model, config = draft.config.model, draft.model_config
    model_type = str(config["model_type"])
    if model_type not in REVERSIBLE_FAMILIES:
        yield f"but it is for {', '.join(REVERSIBLE_FAMILIES)}, not {model_type}", "leave it out"
    elif family_of(model_type).norms_side_by_side and config.get("use_parallel_residual", True):
        why = "but attention and MLP of this model read one input (use_parallel_residual)"
        yield why, "set model.overrides.use_parallel_residual=false"
    for key, is_on in (
        ("model.checkpointing", model.checkpointing != "none"),
        ("model.stochastic_depth", model.stochastic_depth > 0),
        ("model.lora.rank", model.lora.rank is not None),
        ("model.kernels", model.kernels != "none"),
        ("model.compile", model.compile),
    ):
        if is_on:
            yield f"which does not go with {key}", "remove one of them"
    if num_stages(draft.ds.tree) > 1:
        yield "but a pipeline's stages send one stream", "use ZeRO 3 instead of stages"
