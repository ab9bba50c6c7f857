"""Checks for layers that are recomputed, reversible or fused, carry a state, or have adapters."""

import importlib.util
from collections.abc import Iterator

from harness.estimate.hardware import known_gpu
from harness.layout.adapters import linear_weights, module_of
from harness.layout.expert import EXPERTS
from harness.layout.families import FAMILIES, family_of, given_size
from harness.layout.recompute import REVERSIBLE
from harness.layout.state_size import CARRIED
from harness.plan.machine import missing_for_compile
from harness.plan.model_config import published_weights
from harness.plan.plan import NOT_TRAINED, Draft

_OFFLOAD, _TILES = "model.activation_offload", "model.mlp_tiles"
_CARRY, _RANK = "train.carry_state", "model.lora.rank"
REVERSIBLE_FAMILIES = tuple(name for name, each in FAMILIES.items() if "halves" in each.compared)
"""Families whose layers are two residual additions, of attention and of an MLP."""
LIGER_FAMILIES = tuple(name for name, family in FAMILIES.items() if "liger" in family.compared)
"""Families whose loss and gradients were compared with the model's own code."""


def check_recompute(draft: Draft) -> None:
    """Reject recomputation, offload and tiles that have no effect or that the model does not
    support.
    """
    model, shape, problems = draft.config.model, draft.shape, draft.problems
    if model.activation_offload and draft.model_config.get(REVERSIBLE):
        why = "it moves the activations that layers keep, but reversible layers keep none"
        problems.add(_OFFLOAD, why, "remove it")
    elif model.activation_offload and model.checkpointing == "none":
        why = "it moves the activations that checkpointed layers keep, but no layer is checkpointed"
        problems.add(_OFFLOAD, why, "set model.checkpointing to full, selective or N")
    if model.mlp_tiles > 1 and given_size(draft.model_config, "experts"):
        why = f"{model.name} is a mixture of experts, whose routers need all tokens at once"
        problems.add(_TILES, why, "use 1")
    elif (
        model.mlp_tiles > 1
        and shape is not None
        and not any(tensor.name.startswith("mlp.") for tensor in shape.body.layers[0])
    ):
        why = f"the MLPs of {shape.model_type} models are not separate modules"
        problems.add(_TILES, why, "use 1")
    for key, is_on in ((_OFFLOAD, model.activation_offload), (_TILES, model.mlp_tiles > 1)):
        if model.compile and is_on:
            why = "it has no effect in compiled layers (model.compile)"
            problems.add(key, why, "remove one of them")


def check_reversible(draft: Draft) -> None:
    """Reject reversible layers in other families, and together with incompatible settings."""
    model, config = draft.config.model, draft.model_config
    if not config.get(REVERSIBLE):
        return

    def reject(why: str, use: str) -> None:
        draft.problems.add("model.reversible", why, use)

    model_type = config["model_type"]
    if model_type not in REVERSIBLE_FAMILIES:
        reject(f"but it is for {', '.join(REVERSIBLE_FAMILIES)}, not {model_type}", "leave it out")
    elif family_of(model_type).norms_side_by_side and config.get("use_parallel_residual", True):
        why = "but attention and MLP of this model read one input (use_parallel_residual)"
        reject(why, "set model.overrides.use_parallel_residual=false")
    for key, is_on in (
        ("model.checkpointing", model.checkpointing != "none"),
        ("model.stochastic_depth", model.stochastic_depth > 0),
        (_RANK, model.lora.rank is not None),
        ("model.kernels", model.kernels != "none"),
        ("model.compile", model.compile),
    ):
        if is_on:
            reject(f"which cannot be combined with {key}", "remove one of them")
    if draft.grid.pipeline > 1:
        reject("but pipeline stages send only one stream", "use ZeRO 3 instead of stages")


def check_skipped(draft: Draft) -> None:
    """Reject the model's own LayerDrop under ZeRO 2 and 3: each data rank skips other layers, but
    ZeRO pairs the ranks' gradients in the order in which they are computed.
    """
    grid, stage = draft.grid, draft.ds.value("zero_optimization.stage")
    for key in ("layerdrop", "decoder_layerdrop"):
        rate = draft.model_config.get(key)
        if rate and grid.data > 1 and stage in (2, 3) and grid.pipeline == 1:
            why = f"whose {key} of {rate} skips other layers on each of {grid.data} data ranks"
            use = f"set model.overrides.{key}=0; model.stochastic_depth={rate} skips them by row"
            draft.problems.add("model.name", why, use)


def check_kernels(draft: Draft) -> None:
    """Reject model.kernels and model.compile if machine, model or layout cannot use them."""
    config, problems = draft.config, draft.problems
    _check_liger(draft)
    missing = missing_for_compile(draft.world.accelerator) if draft.here else None
    if config.model.compile and missing:
        problems.add("model.compile", f"it needs {missing}")
    stages = draft.grid.pipeline
    for key, is_on in (
        ("model.kernels", config.model.kernels != "none"),
        ("model.compile", config.model.compile),
    ):
        if stages > 1 and is_on:
            why = f"which is untested with pipeline.stages={stages}"
            problems.add(key, why, "leave it out, or use ZeRO 3 instead of stages")


def check_float8(draft: Draft) -> None:
    """Reject float8 products on GPUs, in models and in layouts without them."""
    key, model = "model.float8", draft.config.model
    if model.float8 == "none":
        return
    problems, gpu = draft.problems, known_gpu(draft.world.gpu)
    if draft.world.accelerator == "cpu":
        draft.note("float8", "float8 products are emulated on the CPU: rounded alike, but slower")
    elif gpu is not None and not gpu.float8:
        problems.add(key, f"but {gpu.name} has no float8 products", "set model.float8=none")
    if draft.here and not importlib.util.find_spec("torchao"):
        problems.add(key, "it needs the package torchao (pip install torchao)")
    if draft.precision == "fp16" or draft.ds.value("torch_autocast.enabled"):
        problems.add(key, "but float8 was tried neither with fp16 nor with autocast", "use bf16")
    if given_size(draft.model_config, "experts"):
        problems.add(key, "but routers and experts need their precision", "set it to none")
    family = family_of(str(draft.model_config.get("model_type")))
    if any(module.transposed for module in family.layers):
        problems.add(key, f"but {draft.config.model.name} has no torch.nn.Linear in its layers")
    if model.lora.rank is not None:
        problems.add(key, f"which is untested with adapters ({_RANK})", "leave it out")
    _check_layout(draft, key, "float8 products are not supported")
    if draft.grid.sequence > 1:
        problems.add(
            key, "but the first batch's check would compare with bf16", "use ZeRO 0 to 3 alone"
        )


def note_kernels(draft: Draft) -> None:
    """Note effects of kernels that the estimate ignores."""
    config = draft.config
    if config.model.compile and (draft.shape is None or draft.shape.num_experts):
        draft.note("estimated_unfused", "memory is estimated as if layers were not compiled")
    unfused = config.model.float8 != "none" and not config.model.compile
    if unfused and draft.world.accelerator == "cuda":
        draft.note("float8_unfused", "float8 pays in compiled layers alone: model.compile=true")
    key = "train.loss" if config.train.loss != "cross_entropy" else "train.label_smoothing"
    if config.model.kernels == "liger" and config.get(key):
        why = f"with {key} the head is not fused with the loss (model.kernels)"
        draft.note("loss_not_fused", why)


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
        problems.add(_CARRY, why, f"use one of {', '.join(CARRIED)}, or leave it out")
    for key, why, use in _obstacles_to_carrying(draft):
        problems.add(key, f"but {why} with {_CARRY} ({config.origin(_CARRY)})", use)


def _obstacles_to_carrying(draft: Draft) -> Iterator[tuple[str, str, str]]:
    """Yield each key that is incompatible with carried state, the reason, and an alternative."""
    run, grid = draft.config, draft.grid
    data, model, ramp = run.data, run.model, run.ramp
    divided = "states cannot be sharded", "use ZeRO 0 to 3 alone"
    text, whole = "each row reads one text", "windows follow each other"
    rows, length = "all steps need the same number of rows", "all windows need the same length"
    rehearses = data.rehearse is not None and data.rehearse_share > 0
    for is_on, key, why, use in (
        (grid.pipeline > 1, "pipeline.stages", *divided),
        (grid.tensor > 1, "tensor_parallel.autotp_size", *divided),
        (grid.sequence > 1, "sequence_parallel_size", *divided),
        (model.compile, "model.compile", "layers cannot be compiled", "leave it out"),
        (model.stochastic_depth > 0, "model.stochastic_depth", "layers cannot be skipped", "use 0"),
        (model.lora.rank is not None, _RANK, "adapters are untested", ""),
        (bool(data.mix), "data.mix", text, "set data.path instead, without data.balance"),
        (data.balance is not None, "data.balance", text, "leave it out"),
        (rehearses, "data.rehearse_share", text, "use 0"),
        (data.batching != "packed", "data.batching", whole, "use packed"),
        (data.packing == "whole", "data.packing", whole, "use stream"),
        (bool(data.document_mask), "data.document_mask", whole, "use false"),
        (ramp.batch_from is not None, "ramp.batch_from", rows, ""),
        (ramp.length_from is not None, "ramp.length_from", length, ""),
    ):
        if is_on:
            yield key, why, use


_TIED_HEADS = ("lm_head", "embed_out")
"""Names of heads whose weight is tied to the embedding and so has no separate name."""
_OF_ADAPTERS = (
    *("alpha", "dropout", "targets", "modules_to_save", "rslora", "dora"),
    *("quantize", "double_quantize"),
)


def check_adapters(draft: Draft) -> None:
    """Reject adapters without pretrained weights, and layouts that do not support adapters or
    frozen parameters.
    """
    config, problems, lora = draft.config, draft.problems, draft.config.model.lora
    frozen = [rule.pattern for rule in config.optim.groups if rule.frozen]
    if frozen:
        _check_layout(draft, "optim.groups", "frozen parameters are untested")
    if lora.rank is None:
        for name in _OF_ADAPTERS:
            if config.is_set(f"model.lora.{name}"):
                why = f"but there are no adapters without {_RANK}"
                problems.add(f"model.lora.{name}", why, f"set {_RANK}=16")
        return
    if config.model.init_from is None:
        weights = published_weights(config.model.name)
        use = f"set model.init_from{f'={weights}' if weights else ''}"
        why = draft.problems.worded(_RANK, "but adapters need pretrained weights", use)
        draft.problems.say(why) if draft.here else draft.note(NOT_TRAINED, why)
    if draft.here:
        _require_packages(draft)
    for pattern in frozen:
        why = f"which freezes {pattern!r}, but adapters already freeze all other weights"
        problems.add("optim.groups", why, "leave frozen out")
    for key in ("model.kernels", "model.compile"):
        if config.is_set(key) and config.get(key) not in ("none", False):
            problems.add(key, f"which is untested with adapters ({_RANK})", "leave it out")
    if lora.dora and draft.ds.value("zero_optimization.stage") == 3:
        why = "but peft's DoRA reads full weights, which ZeRO 3 shards"
        problems.add("model.lora.dora", why, "use zero_optimization.stage=2, or plain adapters")
    _check_layout(draft, _RANK, "adapters are not supported")
    _check_modules(draft)
    _note_experts(draft)
    _check_quantization(draft)


def _require_packages(draft: Draft) -> None:
    """Reject adapters and 4-bit weights without the packages that make them."""
    packages = {_RANK: "peft"}
    if draft.config.model.lora.quantize:
        packages["model.lora.quantize"] = "bitsandbytes"
    for key, name in packages.items():
        if not importlib.util.find_spec(name):
            draft.problems.add(key, f"it needs the package {name} (pip install {name})")


def _check_quantization(draft: Draft) -> None:
    """Reject quantized weights that cannot be made or that ZeRO 3 would shard."""
    lora, problems = draft.config.model.lora, draft.problems
    if lora.quantize is None:
        if draft.config.is_set("model.lora.double_quantize"):
            why, use = "but no weights are quantized", 'set model.lora.quantize="nf4"'
            problems.add("model.lora.double_quantize", why, use)
        return
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
            draft.problems.add(key, f"but {why_not} with {ranks} {axis}", "use ZeRO 0 to 3 alone")


def _check_modules(draft: Draft) -> None:
    """Reject names of modules that do not exist, or that cannot be trained in full."""
    lora, shape, problems = draft.config.model.lora, draft.shape, draft.problems
    if shape is None:
        return
    linear = dict.fromkeys(module_of(tensor.name) for tensor in linear_weights(shape))
    if unknown := [target for target in lora.targets if target not in linear]:
        why = f"but no linear layer of the decoder layers is named {', '.join(unknown)}"
        problems.add("model.lora.targets", why, f"they are {', '.join(linear)}")
    dense = (module_of(tensor.name) for tensor in shape.tensors() if tensor.kind != EXPERTS)
    own = [name for name in dict.fromkeys(dense) if name not in linear]
    tied = _TIED_HEADS if shape.tied else ()  # trained as the embedding
    if unknown := [name for name in lora.modules_to_save if name not in (*own, *tied)]:
        why = f"but no module outside the linear layers of the decoder layers is named {unknown[0]}"
        problems.add("model.lora.modules_to_save", why, f"they are {', '.join(own)}")
    elif lora.modules_to_save and not {*lora.modules_to_save} & {*own}:
        why = "which is tied to the embedding"
        problems.add("model.lora.modules_to_save", why, f"add {own[0]}")


def _note_experts(draft: Draft) -> None:
    """Note that experts get no adapters."""
    if given_size(draft.model_config, "experts") is None:
        return
    tensors = [] if draft.shape is None else [*draft.shape.tensors()]
    count = sum(tensor.numel for tensor in tensors if tensor.kind == EXPERTS)
    share = f" ({count:,} of {sum(t.numel for t in tensors):,} parameters)" if count else ""
    draft.note(
        "experts_without_adapters",
        f"experts get no adapters and stay frozen{share}: they are stacked weights, and only "
        "linear layers can have adapters; without model.lora.rank they are trained",
    )
