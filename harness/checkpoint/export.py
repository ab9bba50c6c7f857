"""Taking the weights home: a folder that `AutoModelForCausalLM.from_pretrained` opens."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


def export_hf(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Any,
) -> None:
    """Write safetensors, config and tokenizer; the folder appears by one rename, whole.

    `weights` yields (name, tensor on the CPU) for every parameter of `model`, tied ones once.
    """
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    state = dict(weights)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in state:  # tied: the same object under another name
            state[name] = state[_first_name(model, parameter)]
    for name, buffer in _persistent_buffers(model):
        state[name] = buffer.detach().cpu()
    model.save_pretrained(unfinished, state_dict=state)
    tokenizer.save_pretrained(unfinished)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)


def _first_name(model: torch.nn.Module, parameter: torch.nn.Parameter) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)


def _persistent_buffers(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
