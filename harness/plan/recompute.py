"""Activations that are computed again, or wait on the host, in a plan: requirements."""

from __future__ import annotations

from collections.abc import Iterator

from harness.layout.families import SIZE_KEYS
from harness.layout.recompute import REVERSIBLE
from harness.plan.draft import Draft

_OFFLOAD, _TILES = "model.activation_offload", "model.mlp_tiles"


def check_recompute(draft: Draft) -> None:
    """Refuse combinations of model.checkpointing, activation_offload and mlp_tiles that do nothing,
    or that this model cannot have.
    """
    model, problems = draft.config.model, draft.problems
    if model.activation_offload and draft.model_config.get(REVERSIBLE):
        problems.add(
            _OFFLOAD, "it moves what layers keep, and reversible ones keep none", "remove it"
        )
    elif model.activation_offload and model.checkpointing == "none":
        why = "it moves what checkpointed layers keep, and no layer is checkpointed"
        problems.add(_OFFLOAD, why, "set model.checkpointing to full, selective or N")
    if model.mlp_tiles > 1:
        for why in _of_mlps(draft):
            problems.add(_TILES, why, "use 1")
    if model.compile:
        for key, is_on in (
            ("model.checkpointing", model.checkpointing == "selective"),
            (_OFFLOAD, model.activation_offload),
            (_TILES, model.mlp_tiles > 1),
        ):
            if is_on:
                why = "the compiler does not see what is kept: not with model.compile"
                problems.add(key, why, "remove one of them")


def _of_mlps(draft: Draft) -> Iterator[str]:
    """Why the model's MLPs cannot be computed in tiles."""
    config, name = draft.model_config, draft.config.model.name
    if any(config.get(key) for key in SIZE_KEYS["experts"]):
        yield f"{name} is a mixture of experts, which choose their tokens among all of them"
    elif draft.shape and not any(t.name.startswith("mlp.") for t in draft.shape.body.layers[0]):
        yield f"the MLPs of {draft.shape.model_type} models are no modules of their own"
