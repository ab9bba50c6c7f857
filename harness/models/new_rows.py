"""Rows of a vocabulary for tokens that a model has not seen: the mean of those that it has."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel


def with_rows(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Return a weight (fewer rows, ...) with `rows` rows, or as it is where it lacks none.

    The mean is computed in fp32: new tokens are as likely, and mean as much, as an average one.
    """
    if rows is None or tensor.ndim == 0 or len(tensor) >= rows:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - len(tensor), *tensor.shape[1:])])


def vocabulary_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of a model's embedding and head by name; one where they are tied."""
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    own = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name: p.detach() for name, p in model.named_parameters() if id(p) in own}


def rows_of_adapters(weights: Path, model: PreTrainedModel) -> int | None:
    """Return the rows of an embedding that came with adapters, in peft's file of their weights, or
    None.
    """
    ending = next(iter(vocabulary_of(model)))
    with safe_open(weights, framework="pt") as file:
        shapes = [file.get_slice(n).get_shape() for n in file.keys() if n.endswith(ending)]  # noqa: SIM118
    return int(shapes[0][0]) if shapes else None


@torch.no_grad()
def add_rows(model: PreTrainedModel, rows: int | None) -> None:
    """Give a whole model's embedding and head `rows` rows, in place, where they have fewer."""
    if rows is None or len(model.get_input_embeddings().get_parameter("weight")) >= rows:
        return
    modules = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    grown: dict[int, nn.Parameter] = {}  # tied weights stay one
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in grown:
                weight = with_rows(parameter.detach(), rows)
                grown[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
            setattr(module, name, grown[id(parameter)])
        size = "num_embeddings" if isinstance(module, nn.Embedding) else "out_features"
        setattr(module, size, rows)
    model.config.get_text_config(decoder=True).vocab_size = rows
