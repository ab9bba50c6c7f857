"""Checks adapters (model.lora) against the model, the layout and the installed packages."""

from __future__ import annotations

import importlib.util

from harness.layout.adapters import linear_weights, module_of
from harness.layout.expert import EXPERTS
from harness.layout.families import SIZE_KEYS
from harness.plan.draft import Draft

TIED_HEADS = ("lm_head", "embed_out")
"""Names of heads whose weight is tied to the embedding and so has no separate name."""
_SETTINGS = (
    *("alpha", "dropout", "targets", "modules_to_save", "rslora", "dora"),
    *("quantize", "double_quantize"),
)


def check_adapters(draft: Draft) -> None:
    """Reject adapters without pretrained weights, and layouts that do not support adapters."""
    config, problems, lora = draft.config, draft.problems, draft.config.model.lora
    if any(rule.frozen for rule in config.optim.groups):
        _check_layout(draft, "optim.groups", "frozen parameters are untested")
    if lora.rank is None:
        for key in _SETTINGS:
            if config.is_set(f"model.lora.{key}"):
                why = "but there are no adapters without model.lora.rank"
                use = "set model.lora.rank=16"
                problems.add(f"model.lora.{key}", why, use)
        return
    if config.model.init_from is None:
        why = "but adapters need pretrained weights"
        problems.add("model.lora.rank", why, "set model.init_from")
    if not importlib.util.find_spec("peft"):
        problems.add("model.lora.rank", "it needs the package peft (pip install peft)")
    for rule in config.optim.groups:
        if rule.frozen:
            why = f"which freezes {rule.pattern!r}, but adapters already freeze all other weights"
            problems.add("optim.groups", why, "leave frozen out")
    for key in ("kernels", "compile"):
        if config.is_set(f"model.{key}") and config.get(f"model.{key}") not in ("none", False):
            why = "which is untested with adapters (model.lora.rank)"
            problems.add(f"model.{key}", why, "leave it out")
    if lora.dora and draft.ds.value("zero_optimization.stage") == 3:
        why = "but peft's DoRA reads full weights, which ZeRO 3 shards"
        problems.add("model.lora.dora", why, "use zero_optimization.stage=2, or plain adapters")
    _check_layout(draft, "model.lora.rank", "adapters are not supported")
    _check_targets(draft)
    _check_whole(draft)
    _note_experts(draft)
    _check_quantization(draft)


def _check_quantization(draft: Draft) -> None:
    """Reject quantized weights that cannot be made or that ZeRO 3 would shard."""
    lora, problems = draft.config.model.lora, draft.problems
    if lora.quantize is None:
        if draft.config.is_set("model.lora.double_quantize"):
            why, use = "but no weights are quantized", 'set model.lora.quantize="nf4"'
            problems.add("model.lora.double_quantize", why, use)
        return
    if not importlib.util.find_spec("bitsandbytes"):
        why = "it needs the package bitsandbytes (pip install bitsandbytes)"
        problems.add("model.lora.quantize", why)
    if draft.model_config.get("model_type") == "falcon":
        why = "but falcon has its own class of linear layers, which bitsandbytes does not quantize"
        problems.add("model.lora.quantize", why, "leave it out")
    if draft.ds.value("zero_optimization.stage") == 3:
        why = "but ZeRO 3 cannot shard 4-bit weights, which are codes and scales"
        use = "use zero_optimization.stage=2, with the whole model in 4 bits on every rank"
        problems.add("model.lora.quantize", why, f"{use}, or leave quantize out")


def _check_layout(draft: Draft, key: str, why_not: str) -> None:
    grid = draft.grid
    for axis, ranks in (
        ("pipeline stages", grid.pipeline),
        ("tensor-parallel ranks", grid.tensor),
        ("expert-parallel ranks", grid.expert),
    ):
        if ranks > 1:
            why = f"but {why_not} with {ranks} {axis}"
            draft.problems.add(key, why, "use ZeRO 0 to 3 alone")


def _check_targets(draft: Draft) -> None:
    """Reject names that no linear layer of the model has."""
    lora = draft.config.model.lora
    if draft.shape is None or not lora.targets:
        return
    names = [tensor.name.removesuffix(".weight") for tensor in linear_weights(draft.shape)]
    last = [*dict.fromkeys(name.rpartition(".")[2] for name in names)]
    if unknown := [target for target in lora.targets if target not in last]:
        why = f"but no linear layer of the decoder layers is named {', '.join(unknown)}"
        draft.problems.add("model.lora.targets", why, f"they are {', '.join(last)}")


def _check_whole(draft: Draft) -> None:
    """Reject names of modules that do not exist or cannot be trained in full."""
    lora = draft.config.model.lora
    if draft.shape is None or not lora.modules_to_save:
        return
    linear = {module_of(tensor.name) for tensor in linear_weights(draft.shape)}
    dense = (tensor for tensor in draft.shape.tensors() if tensor.kind != EXPERTS)
    names = dict.fromkeys(module_of(tensor.name) for tensor in dense)
    own = [name for name in names if name not in linear]
    tied = TIED_HEADS if draft.shape.tied else ()  # trained as the embedding
    if unknown := [name for name in lora.modules_to_save if name not in (*own, *tied)]:
        why = f"but no module outside the linear layers of the decoder layers is named {unknown[0]}"
        draft.problems.add("model.lora.modules_to_save", why, f"they are {', '.join(own)}")
    elif not {*lora.modules_to_save} & {*own}:
        why = "which is tied to the embedding"
        draft.problems.add("model.lora.modules_to_save", why, f"add {own[0]}")


def _note_experts(draft: Draft) -> None:
    """Note that experts get no adapters."""
    config, shape = draft.model_config, draft.shape
    if not any(isinstance(config.get(key), int) for key in SIZE_KEYS["experts"]):
        return
    tensors = [] if shape is None else [*shape.tensors()]
    count = sum(tensor.numel for tensor in tensors if tensor.kind == EXPERTS)
    share = f" ({count:,} of {sum(t.numel for t in tensors):,} parameters)" if count else ""
    draft.note(
        "experts_without_adapters",
        f"experts get no adapters and stay frozen{share}: they are stacked weights, and only "
        "linear layers can have adapters; without model.lora.rank they are trained",
    )
