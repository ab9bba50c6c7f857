"""Fused kernels and compilation in a plan: requirements, and gaps in the estimate."""

from __future__ import annotations

import importlib.util

from harness.layout.families import FAMILIES
from harness.plan.draft import Draft
from harness.plan.machine import missing_for_compile
from harness.plan.pipeline import num_stages

LIGER_FAMILIES = tuple(name for name, family in FAMILIES.items() if "liger" in family.compared)
"""Families whose loss and gradients were compared with the model's own code."""


def check_kernels(draft: Draft) -> None:
    """Refuse model.kernels and model.compile if this machine, model or layout cannot use them."""
    config, problems = draft.config, draft.problems
    _check_liger(draft)
    missing = missing_for_compile(draft.world.accelerator)
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
            f"{keys}: not with pipeline.stages={stages}, where nobody has compared them with the "
            "model as it is: leave it out, or use ZeRO 3 instead of stages"
        )


def note_kernels(draft: Draft) -> None:
    """Add events for effects of kernels that the estimate leaves out."""
    config = draft.config
    if config.model.compile:
        draft.note("estimated_unfused", "memory is estimated as if nothing were compiled")
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
