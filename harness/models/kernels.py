"""Fused kernels in the place of a model's own operations."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel


def use_liger(model: PreTrainedModel) -> None:
    """Give this model Liger's RMSNorm and SwiGLU, and its head fused with the cross-entropy, which
    never holds all logits; `loss.forward` then takes the sum over targets from it.

    Liger also replaces the classes in transformers' module, for every model to come: an export is
    checked on the CPU, where Triton does not run. So they are put back; and its rotary embedding,
    which is such a function and no module, is left out.
    """
    # Imports Triton, which looks for a GPU.
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    module = vars(sys.modules[type(model).__module__])
    before = {**module}
    _apply_liger_kernel_to_instance(model, rope=False, fused_linear_cross_entropy=True)
    module.update(before)
    vars(model)["fuses_loss"] = True
