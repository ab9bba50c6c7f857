"""Expert parallelism: which experts of a layer each rank holds.

transformers' plans (plans.json) name the parameters with experts in dimension 0. Routers and shared
experts are not among them; every rank holds them in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from harness.layout.box import Range, share_of
from harness.layout.families import compared_families, family_of
from harness.layout.shape import Shape, Tensor
from harness.layout.tensor import expert_plan

_DIVIDED, _MODULE = "grouped_gemm", "ep_dispatch_experts"
EXPERTS = "experts"
"""The kind of expert tensors."""
Ranges = tuple[Range, ...]
FAMILIES = compared_families("divided experts")
"""Families whose expert-parallel results were compared with those without."""


@dataclass(frozen=True)
class ExpertPlan:
    """The distribution of one model's experts over neighbouring data-parallel ranks."""

    names: tuple[str, ...]
    """Suffixes of the names of the split parameters."""
    num_experts: int
    """Number per layer with experts."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertPlan:
        """Return the plan of a model from its HF `config.json`. Raises ValueError like `make`."""
        model_type = str(config["model_type"])
        values = (config.get(key) for key in family_of(model_type).size_keys("experts"))
        return cls.make(model_type, next((v for v in values if isinstance(v, int)), 0))

    @classmethod
    def make(cls, model_type: str, num_experts: int) -> ExpertPlan:
        """Return the plan of a model of a family with this number of experts.

        Raises ValueError naming the family if it does not support expert parallelism.
        """
        plan = expert_plan(model_type) or {}
        if model_type not in FAMILIES or not num_experts:
            reason = "has experts that were never tested divided" if plan else "has no experts"
            families = ", ".join(FAMILIES)
            raise ValueError(f"{model_type} {reason}: expert parallelism supports {families}")
        others = {style for style in plan.values() if style not in (_DIVIDED, _MODULE)}
        if others:
            raise ValueError(f"{model_type} has experts of unknown styles: {sorted(others)}")
        ends = (name.removeprefix("layers.*.") for name, s in plan.items() if s == _DIVIDED)
        return cls(tuple(sorted(ends)), num_experts)

    def divides(self, name: str) -> bool:
        """Return True if a parameter, by its qualified name, contains experts."""
        return any(name.endswith(f".{end}") for end in self.names)

    @property
    def modules(self) -> frozenset[str]:
        """Suffixes of the names of the modules that own the experts."""
        return frozenset(name.rpartition(".")[0] for name in self.names)

    def legal(self, ranks: int) -> list[int]:
        """Return the possible expert-parallel sizes for this number of data-parallel ranks."""
        return [n for n in range(1, ranks + 1) if not ranks % n and not self.num_experts % n]

    def problem(self, places: int, ranks: int) -> str:
        """Return why `places` of `ranks` data ranks cannot share the experts; "" if they can."""
        legal = self.legal(ranks)
        if places in legal:
            return ""
        whole = [f"{self.num_experts} experts"] if self.num_experts % places else []
        whole += [f"{ranks} data ranks"] if ranks % places else []
        return f"it does not divide {' and '.join(whole)}: use {' or '.join(map(str, legal))}"

    def cut(self, name: str, shape: tuple[int, ...], place: int, places: int) -> dict[int, Ranges]:
        """Return the ranges of each sliced dimension of a parameter, as a `grid.Cutter`."""
        if places == 1 or not self.divides(name):
            return {}
        return {0: share_of(shape[0], place, places)}


@lru_cache(maxsize=64)
def expert_shard(shape: Shape, ranks: int) -> Shape:
    """Return the shape on each of `ranks` expert-parallel ranks; routers stay whole."""
    if ranks == 1:
        return shape

    def cut(tensor: Tensor) -> Tensor:
        if tensor.kind != EXPERTS:
            return tensor
        return replace(tensor, shape=(tensor.shape[0] // ranks, *tensor.shape[1:]))

    # Identical layers are one object, before and after.
    kinds = {id(layer): layer for layer in shape.body.layers}
    parts = {kind: tuple(map(cut, layer)) for kind, layer in kinds.items()}
    layers = tuple(parts[id(layer)] for layer in shape.body.layers)
    return replace(shape, body=replace(shape.body, layers=layers))
