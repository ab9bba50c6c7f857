"""Checks for layers that are recomputed, reversible, fused, or carry a state."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from harness.layout.families import FAMILIES, SIZE_KEYS, family_of
from harness.layout.recompute import REVERSIBLE
from harness.layout.state_size import CARRIED
from harness.plan.draft import Draft
from harness.plan.machine import missing_for_compile
from harness.plan.pipeline import num_stages

_OFFLOAD, _TILES = "model.activation_offload", "model.mlp_tiles"


def check_recompute(draft: Draft) -> None:
    """Reject combinations of model.checkpointing, activation_offload and mlp_tiles that have no
    effect or that this model does not support.
    """
    model, problems = draft.config.model, draft.problems
    if model.activation_offload and draft.model_config.get(REVERSIBLE):
        problems.add(
            _OFFLOAD,
            "it moves the activations that layers keep, but reversible layers keep none",
            "remove it",
        )
    elif model.activation_offload and model.checkpointing == "none":
        why = "it moves the activations that checkpointed layers keep, but no layer is checkpointed"
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
                why = "it has no effect in compiled layers (model.compile)"
                problems.add(key, why, "remove one of them")


def _of_mlps(draft: Draft) -> Iterator[str]:
    """Yield the reasons why the model's MLPs cannot be tiled."""
    config, name = draft.model_config, draft.config.model.name
    if any(config.get(key) for key in SIZE_KEYS["experts"]):
        yield f"{name} is a mixture of experts, whose routers need all tokens at once"
    elif draft.shape and not any(t.name.startswith("mlp.") for t in draft.shape.body.layers[0]):
        yield f"the MLPs of {draft.shape.model_type} models are not separate modules"


REVERSIBLE_FAMILIES = tuple(name for name, each in FAMILIES.items() if "halves" in each.compared)
"""Families whose layers are two residual additions, of attention and of an MLP."""


def check_reversible(draft: Draft) -> None:
    """Reject reversible layers in other families, and together with incompatible settings."""
    if not draft.model_config.get(REVERSIBLE):
        return
    for why, use in _obstacles(draft):
        draft.problems.add("model.reversible", why, use)


def _obstacles(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield each reason and its fix."""
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
            yield f"which cannot be combined with {key}", "remove one of them"
    if num_stages(draft.ds.tree) > 1:
        yield "but pipeline stages send only one stream", "use ZeRO 3 instead of stages"


LIGER_FAMILIES = tuple(name for name, family in FAMILIES.items() if "liger" in family.compared)
"""Families whose loss and gradients were compared with the model's own code."""


def check_kernels(draft: Draft) -> None:
    """Reject model.kernels and model.compile if machine, model or layout cannot use them."""
    config, problems = draft.config, draft.problems
    _check_liger(draft)
    missing = missing_for_compile(draft.world.accelerator) if draft.here else None
    if config.model.compile and missing:
        problems.add("model.compile", f"it needs {missing}")
    enabled = {
        "model.kernels": config.model.kernels != "none",
        "model.compile": config.model.compile,
    }
    stages = num_stages(draft.ds.tree)
    if stages > 1 and any(enabled.values()):
        keys = " and ".join(f"{key} ({config.origin(key)})" for key in enabled if enabled[key])
        problems.say(
            f"{keys}: untested with pipeline.stages={stages}: leave it out, or use ZeRO 3 "
            "instead of stages"
        )


def note_kernels(draft: Draft) -> None:
    """Note effects of kernels that the estimate ignores."""
    config = draft.config
    if config.model.compile and (draft.shape is None or draft.shape.num_experts):
        draft.note("estimated_unfused", "memory is estimated as if layers were not compiled")
    if config.model.kernels == "liger" and config.train.label_smoothing:
        draft.note(
            "loss_not_fused",
            "with train.label_smoothing the head is not fused with the loss (model.kernels)",
        )


def _check_liger(draft: Draft) -> None:
    if draft.config.model.kernels != "liger":
        return
    key, model_type = "model.kernels", draft.model_config.get("model_type")
    is_missing = draft.here and not importlib.util.find_spec("liger_kernel")
    if draft.world.accelerator == "cpu" or is_missing:
        why = "it needs a GPU and the package liger-kernel (pip install)"
        draft.problems.add(key, why, 'use "none"')
    if model_type and model_type not in LIGER_FAMILIES:
        why = f"it is for {', '.join(LIGER_FAMILIES)}, not {model_type}"
        draft.problems.add(key, why, 'use "none"')


_KEY = "train.carry_state"


def check_carried(draft: Draft) -> None:
    """Reject carried state for models without one, and settings that shard the state or interrupt a
    row's text.
    """
    config, problems = draft.config, draft.problems
    if not config.train.carry_state:
        return
    kind = draft.model_config.get("model_type")
    if kind is not None and kind not in CARRIED:
        why = f"but {config.model.name} is a {kind} model, which carries no state"
        problems.add(_KEY, why, f"use one of {', '.join(CARRIED)}, or leave it out")
    for key, why, use in _in_the_way(draft):
        problems.add(key, f"but {why} with {_KEY} ({config.origin(_KEY)})", use)


def _in_the_way(draft: Draft) -> Iterator[tuple[str, str, str]]:
    """Yield each key that is incompatible with carried state, the reason, and an alternative."""
    run, grid = draft.config, draft.grid
    data, model, ramp = run.data, run.model, run.ramp
    divided = "states cannot be sharded", "use ZeRO 0 to 3 alone"
    text, whole = "each row reads one text", "windows follow each other"
    for is_on, key, why, use in (
        (num_stages(draft.ds.tree) > 1, "pipeline.stages", *divided),
        (grid.tensor > 1, "tensor_parallel.autotp_size", *divided),
        (grid.sequence > 1, "sequence_parallel_size", *divided),
        (model.compile, "model.compile", "layers cannot be compiled", "leave it out"),
        (model.stochastic_depth > 0, "model.stochastic_depth", "layers cannot be skipped", "use 0"),
        (model.lora.rank is not None, "model.lora.rank", "adapters are untested", ""),
        (bool(data.mix), "data.mix", text, "set data.path instead, without data.balance"),
        (data.balance is not None, "data.balance", text, "leave it out"),
        (
            data.rehearse is not None and data.rehearse_share > 0,
            *("data.rehearse_share", text, "use 0"),
        ),
        (data.batching != "packed", "data.batching", whole, "use packed"),
        (data.packing == "whole", "data.packing", whole, "use stream"),
        (bool(data.document_mask), "data.document_mask", whole, "use false"),
        (
            ramp.batch_from is not None,
            "ramp.batch_from",
            "all steps need the same number of rows",
            "",
        ),
        (ramp.length_from is not None, "ramp.length_from", "all windows need the same length", ""),
    ):
        if is_on:
            yield key, why, use
