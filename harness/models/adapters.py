"""Adapters of low rank beside a decoder's linear maps, by peft; everything else is frozen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from harness.config.model_section import LoraConfig
from harness.layout.adapters import NAME, module_of
from harness.layout.optimizer_table import Parameter
from harness.models.pieces import decoder_layers

_LINEAR = (nn.Linear, Conv1D)


def add_adapters(
    model: PreTrainedModel, lora: LoraConfig, seed: int, parameters: Sequence[Parameter] = ()
) -> list[Parameter]:
    """Put adapters beside the linear maps of the decoder layers, in place; return what decides the
    optimizer groups of their parameters, and of those of modules that are trained whole, which is
    among that of all the model's `parameters`.

    A is drawn from `seed`, alike on all ranks, and B is zero: the model computes what it did. They
    have device and dtype of the weights that they adapt, which may be partitioned by ZeRO 3.
    """
    from peft import inject_adapter_in_model  # a second, which runs without adapters need not take

    model.requires_grad_(False)
    model.is_loaded_in_4bit = lora.quantize is not None  # type: ignore[assignment]  # peft asks
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(_peft_config(lora, linear_maps(model)), model, NAME)
    del model.is_loaded_in_4bit
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if lora.quantize is not None:  # else adapters are made in the weights' precision
        for _, p in trained:
            p.data = p.data.to(model.dtype)
    whole = [p for p in parameters if module_of(p.name) in lora.modules_to_save]
    for parameter in whole:
        model.get_parameter(parameter.name).requires_grad_(True)
    return [*(Parameter(name, matrix=p.ndim >= 2) for name, p in trained), *whole]


def linear_maps(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of the linear maps in a model's decoder layers."""
    _, layers = decoder_layers(model)
    names = (name for name, module in layers.named_modules() if isinstance(module, _LINEAR))
    return sorted({name.rpartition(".")[2] for name in names})


def _peft_config(lora: LoraConfig, targets: list[str]) -> Any:
    """Return the adapters as peft describes them; `targets` where `lora` names none."""
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
    """Return what peft's adapter_config.json says of the adapters in a model, which were made
    beside the weights of `base`; {} of a model without.
    """
    if not hasattr(model, "peft_config"):
        return {}
    values = {**model.peft_config[NAME].to_dict(), "base_model_name_or_path": base}
    if lora.modules_to_save:
        values["modules_to_save"] = lora.modules_to_save
    return json.loads(json.dumps(values, default=sorted))  # type: ignore[no-any-return]
