"""The pieces that a decoder is built from, one at a time."""

from __future__ import annotations  # exports are opened by older Pythons, too

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Unit:
    """Modules that are initialised, placed and partitioned together: a decoder layer with
    everything in it, or another module that directly owns parameters.
    """

    name: str  # qualified name of the module within the model
    module: nn.Module
    whole: bool  # True: the module and its descendants; False: only its own parameters

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return qualified names and modules, children before their parents."""
        if not self.whole:
            return [(self.name, self.module)]
        named = [(_join(self.name, name), module) for name, module in self.module.named_modules()]
        return named[::-1]

    def parameters(self) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
        """Return (qualified name, owner, attribute, parameter) per parameter, in model order."""
        return [
            (_join(name, attribute), module, attribute, parameter)
            for name, module in reversed(self.modules())
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        ]

    def saved_buffers(self) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
        """Return (qualified name, owner, attribute, buffer) per buffer saved with the weights."""
        return [
            (_join(name, attribute), module, attribute, buffer)
            for name, module in reversed(self.modules())
            for attribute, buffer in module._buffers.items()
            if buffer is not None and attribute not in module._non_persistent_buffers_set
        ]


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder layers.

    Raises ValueError if no ModuleList of the model has `num_hidden_layers` entries.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return name, module
    raise ValueError(
        f"{type(model).__name__} has no list of {layers} decoder layers (num_hidden_layers); "
        "the harness finds layers by that list"
    )


def units(model: PreTrainedModel) -> Iterator[Unit]:
    """Yield the pieces of a model, in the order of its modules."""
    list_name, layers = decoder_layers(model)
    inside = {id(module) for module in layers.modules()}
    for name, module in model.named_modules():
        if module is layers:
            for index, layer in enumerate(layers):
                yield Unit(f"{list_name}.{index}", layer, whole=True)
        elif id(module) not in inside and any(p is not None for p in module._parameters.values()):
            yield Unit(name, module, whole=False)


def loops_over_experts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules whose forward pass calls a submodule with parameters per chosen expert,
    rather than computing with stacked weights of all experts: DBRX's, and those of most models with
    their own code.
    """
    loops = []
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        if last == "experts" and any(True for part in module.children() for _ in part.parameters()):
            is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # without a forward pass
            loops.append(model.get_submodule(owner) if is_list else module)
    return loops


def meta_logits(skeleton: PreTrainedModel) -> torch.Tensor:
    """Return the logits of a skeleton's forward pass, without router outputs, on the meta device.

    Raises whatever the model's code raises.
    """
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    routers = "output_router_logits"
    quiet = {routers: False} if hasattr(skeleton.config, routers) else {}
    logits: torch.Tensor = skeleton(input_ids=ids, use_cache=False, **quiet).logits
    return logits


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
