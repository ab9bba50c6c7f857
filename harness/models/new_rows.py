"""Rows of a vocabulary for tokens that a model has not seen: the mean of those that it has."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
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
    before = {name: len(weight) for name, weight in vocabulary_of(model).items()}
    if rows is None or rows <= min(before.values()):
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    for name, weight in vocabulary_of(model).items():
        weight.copy_(with_rows(weight[: before[name]], rows))
