"""Defaults of a run that begins with given weights: their shape, a low rate at once, one epoch."""

from __future__ import annotations

from typing import Any

from harness.config.assignments import assign
from harness.config.run_file import validated
from harness.config.sections import LENGTHS
from harness.plan.draft import Draft
from harness.plan.model_config import IMPLIED

# Maximum learning rates of Adam. All weights: that of Llama 2's fine-tuning (arXiv 2307.09288,
# section 3.1). Adapters: QLoRA's for models of up to 13B (arXiv 2305.14314, table 9).
FULL_LR, ADAPTER_LR = 2e-5, 2e-4


def default_to_fine_tuning(draft: Draft) -> None:
    """Fill in what the user left open beside model.init_from; each value is an event."""
    config = draft.config
    source, defaults = config.model.init_from, dict[str, Any]()
    if source is None:
        return
    if not config.is_set("model.name"):
        defaults["model.name"] = source
    if not config.is_set("optim.lr") and config.optim.name in ("adamw", "adam"):
        defaults["optim.lr"] = FULL_LR if config.model.lora.rank is None else ADAPTER_LR
        if not config.is_set("optim.warmup_steps"):  # a short run would end within it
            defaults["optim.warmup_steps"] = 0
    if not any(config.is_set(key) for key in LENGTHS):
        defaults["train.epochs"] = 1.0
    if not defaults:
        return
    tree, origins = config.model_dump(exclude_unset=True), config.origins()
    for key, value in defaults.items():
        assign(tree, key, value)
        origins[key] = IMPLIED
    draft.config = validated(tree, origins)
    values = ", ".join(f"{key}={value}" for key, value in defaults.items())
    draft.note("fine_tuning", f"{values}: the defaults of a run with given weights")
