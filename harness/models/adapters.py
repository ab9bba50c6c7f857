"""Low-rank adapters (LoRA) on frozen weights, which may be quantized to 4 bits (QLoRA)."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from harness.config.model_section import LoraConfig
from harness.layout.adapters import BLOCK, NAME, Quantization, module_of, quiet_bitsandbytes
from harness.layout.optimizer_table import Parameter
from harness.models.units import decoder_layers


def quantize_linear_maps(
    empty: PreTrainedModel, quantization: Quantization
) -> Callable[[str, torch.Tensor], nn.Parameter]:
    """Replace the linear layers in a skeleton's decoder layers by quantized ones, in place. Return
    a function from (name, weight as read) to the parameter to keep: codes and scales if quantized.
    """
    quiet_bitsandbytes()
    from bitsandbytes.nn import Linear4bit, Params4bit

    settings: dict[str, Any] = {
        "compress_statistics": quantization.doubles,
        "quant_type": quantization.kind,
    }
    sources = dict(_linear_maps(empty))
    for name, source in sources.items():
        outputs, inputs = _upright(source, source.weight).shape
        has_bias = source.bias is not None
        made = Linear4bit(inputs, outputs, has_bias, empty.dtype, device="meta", **settings)
        # On CPUs with bf16 instructions the first evaluation would repack the weight with bf16
        # scales, after which no gradients flow.
        made.support_avx512bf16_for_cpu = False
        # The weights as read, until they are quantized.
        made.weight, made.bias = source.weight.requires_grad_(False), source.bias
        empty.set_submodule(name, made)

    def quantized(name: str, whole: torch.Tensor) -> nn.Parameter:
        source = sources.get(name.removesuffix(".weight"))
        if source is None:
            return nn.Parameter(whole)
        values = _upright(source, whole).contiguous()
        made: Any = Params4bit(values, requires_grad=False, blocksize=BLOCK, **settings)
        parameter: nn.Parameter = made.to(whole.device)  # this quantizes it
        return parameter

    return quantized


@torch.no_grad()
def round_linear_maps(
    model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype
) -> None:
    """Round the weights of a model's linear layers, in place, to the quantized values with which a
    run in precision `dtype` computes.
    """
    quiet_bitsandbytes()
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for _, module in _linear_maps(model):
        values = _upright(module, module.weight).to(dtype).contiguous()
        codes, state = quantize_4bit(
            values,
            blocksize=BLOCK,
            compress_statistics=quantization.doubles,
            quant_type=quantization.kind,
        )
        module.weight.copy_(_upright(module, dequantize_4bit(codes, state)))


def described(model: PreTrainedModel, quantization: Quantization) -> dict[str, Any]:
    """Return the quantization in the format of transformers' config.json (BitsAndBytesConfig), so
    that `from_pretrained` quantizes the same weights in the same way.
    """
    layers, _ = decoder_layers(model)
    outside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(f"{layers}.")
    ]
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quantization.kind,
        "bnb_4bit_use_double_quant": quantization.doubles,
        "bnb_4bit_compute_dtype": str(model.dtype).removeprefix("torch."),
        "llm_int8_skip_modules": outside,
    }


def of_description(description: dict[str, Any]) -> Quantization:
    """Return the quantization that `described` wrote."""
    kind = description["bnb_4bit_quant_type"]
    return Quantization(kind, description["bnb_4bit_use_double_quant"])


def _linear_maps(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of the linear layers in a model's decoder layers. Subclasses that
    compute something else, such as routers, are left out.
    """
    prefix, layers = decoder_layers(model)
    for name, module in [*layers.named_modules()]:
        if type(module) in (nn.Linear, Conv1D):
            yield f"{prefix}.{name}", module


def _upright(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as (outputs, inputs), or such a weight in the module's own layout."""
    return weight.T if isinstance(module, Conv1D) else weight


def add_adapters(
    model: PreTrainedModel, lora: LoraConfig, seed: int, parameters: Sequence[Parameter] = ()
) -> list[Parameter]:
    """Add adapters to the linear layers of the decoder layers, in place. Return the optimizer
    properties of all trained parameters: those of adapters, and those of modules trained in full,
    taken from `parameters`.

    A is drawn from `seed`, identically on all ranks, and B is zero, so the model's output is
    unchanged. Both have the device and dtype of the weights that they adapt, which ZeRO 3 may have
    partitioned.
    """
    quiet_bitsandbytes()
    from peft import inject_adapter_in_model  # takes a second; only adapters need it

    model.requires_grad_(False)
    model.is_loaded_in_4bit = lora.quantize is not None  # type: ignore[assignment]  # peft reads it
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(_peft_config(lora, linear_maps(model)), model, NAME)
    del model.is_loaded_in_4bit
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if lora.quantize is not None:  # otherwise adapters already have the weights' precision
        for _, p in trained:
            p.data = p.data.to(model.dtype)
    whole = [p for p in parameters if module_of(p.name) in lora.modules_to_save]
    for parameter in whole:
        model.get_parameter(parameter.name).requires_grad_(True)
    return [*(Parameter(name, matrix=p.ndim >= 2) for name, p in trained), *whole]


def linear_maps(model: PreTrainedModel) -> list[str]:
    """Return the last name components of the linear layers in a model's decoder layers."""
    _, layers = decoder_layers(model)
    names = (
        name for name, module in layers.named_modules() if isinstance(module, nn.Linear | Conv1D)
    )
    return sorted({name.rpartition(".")[2] for name in names})


def _peft_config(lora: LoraConfig, targets: list[str]) -> Any:
    """Return the adapters as a peft config; `targets` is used if `lora` names none."""
    from peft import LoraConfig as PeftConfig

    assert lora.rank is not None
    alpha: Any = 2 * lora.rank if lora.alpha is None else lora.alpha  # peft declares an integer
    return PeftConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets or targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def adapters_of(model: Any, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json for the adapters in a model, which were
    trained on the weights of `base`; {} for a model without adapters.
    """
    if not hasattr(model, "peft_config"):
        return {}
    values = {**model.peft_config[NAME].to_dict(), "base_model_name_or_path": base}
    if lora.modules_to_save:
        values["modules_to_save"] = lora.modules_to_save
    return json.loads(json.dumps(values, default=sorted))  # type: ignore[no-any-return]
