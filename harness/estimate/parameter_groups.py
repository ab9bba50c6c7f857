"""The parameters of a model as its optimizer has them: trained, in groups, or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from harness.layout.adapters import Adapters, linear_weights
from harness.layout.expert import EXPERTS
from harness.layout.optimizer_table import GroupRule, Parameter, is_frozen, optimizer_groups
from harness.layout.quantization import Quantization
from harness.layout.shape import Shape
from harness.layout.tensors import Tensor


@lru_cache(maxsize=256)
def quantized_elements(shape: Shape, quantization: Quantization | None) -> list[int]:
    """Return the elements of each quantized weight."""
    return [] if quantization is None else [tensor.numel for tensor in linear_weights(shape)]


@lru_cache(maxsize=256)
def trained_tensors(
    shape: Shape, rules: tuple[GroupRule, ...], adapters: Adapters | None
) -> list[Tensor]:
    """Return the parameters that the optimizer steps."""
    if adapters is not None:
        return [*adapters.tensors(shape)]
    tensors = [*shape.tensors()]
    return [t for t in tensors if not is_frozen(t.name, rules)] if rules else tensors


@lru_cache(maxsize=256)
def parameter_groups(
    shape: Shape, rules: tuple[GroupRule, ...], adapters: Adapters | None, muon: bool, divided: bool
) -> list[list[Tensor]]:
    """Return the parameter groups of the optimizer, each in the model's order.

    Matrices decay; biases, norms and embeddings, tied to the head or not, do not. `divided` experts
    have groups of their own.
    """
    tensors = {tensor.name: tensor for tensor in trained_tensors(shape, rules, adapters)}
    parameters = (
        Parameter(
            name,
            matrix=len(tensor.shape) >= 2 and tensor.kind != "embedding",
            head=tensor.kind == "head",
        )
        for name, tensor in tensors.items()
    )
    groups = optimizer_groups(parameters, 1.0, rules, muon)
    named = [[tensors[name] for name in names] for _, names in groups]
    if not divided:
        return named
    parts = [
        [tensor for tensor in group if (tensor.kind == EXPERTS) == experts]
        for group in named
        for experts in (False, True)
    ]
    return [part for part in parts if part]


def is_of_experts(group: Sequence[Tensor]) -> bool:
    """Return whether a group is one of divided experts."""
    return group[0].kind == EXPERTS
