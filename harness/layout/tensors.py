"""A model's parameters by name, shape and kind.

Names and shapes, not totals, because DeepSpeed shards, buckets and pads whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from harness.layout.families import Module, holds
from harness.layout.sizes import Keys, Sizes, flags_on


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name within the model (or within its layer) and its shape."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """embedding, attention, states, mlp, router, experts, norm, projection or head; a bias has the
    kind of its weight. `states`: of layers that carry a state from token to token."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Body:
    """A model's tensors in the order in which a forward pass meets them."""

    before: tuple[Tensor, ...]
    """Embeddings and what follows them; names within the model."""
    layer_prefix: str
    """Beginning of a layer's name, before its index, such as "model.layers."."""
    layers: tuple[tuple[Tensor, ...], ...]
    """Per layer; names within the layer."""
    after: tuple[Tensor, ...]
    """Final norm and head; names within the model.  A tied head has no tensor of its own."""
    first_layer: int = 0
    """Index of the first of `layers` in the whole model."""

    @property
    def units(self) -> tuple[tuple[Tensor, ...], ...]:
        """Tensors that a pipeline keeps together: before the layers, every layer, after them."""
        return self.before, *self.layers, self.after


def build_body(sizes: Sizes, keys: Keys) -> Body:
    """The tensors that the modules of the model's family come to; families.toml has the grammar."""
    family = sizes.family
    on = flags_on(keys, family) | (set() if sizes.tied else {"untied"})
    embedded = keys.size("word_embed_proj_dim", default=sizes.hidden_size)
    on |= {"projected"} if embedded != sizes.hidden_size else set()
    widths = {
        "hidden": sizes.hidden_size,
        "embedded": embedded,
        "q": sizes.q_size,
        "kv": sizes.kv_size,
        "head": sizes.head_dim,
        "width": sizes.intermediate_size,
        "vocab": sizes.vocab_size,
        "positions": sizes.max_positions,
        "experts": sizes.num_experts,
        "expert_width": sizes.expert_size,
    }

    def tensors(modules: tuple[Module, ...], on: set[str]) -> tuple[Tensor, ...]:
        return tuple(tensor for module in modules for tensor in _tensors(module, on, widths))

    dense, sparse = tensors(family.layers, on), tensors(family.layers, on | {"sparse"})
    layers = tuple(sparse if has_experts else dense for has_experts in _sparse(sizes, keys))
    return Body(tensors(family.before, on), family.layer_prefix, layers, tensors(family.after, on))


def _sparse(sizes: Sizes, keys: Keys) -> list[bool]:
    """Return, for each layer, whether it has experts instead of an MLP (Qwen3-MoE mixes both)."""
    every = keys.size("decoder_sparse_step", default=1)
    dense = keys.config.get("mlp_only_layers") or ()
    return [
        sizes.num_experts > 0 and layer not in dense and (layer + 1) % every == 0
        for layer in range(sizes.num_layers)
    ]


def _tensors(module: Module, on: set[str], widths: dict[str, int]) -> Iterator[Tensor]:
    """The weight and perhaps the bias of one module, given the flags that are on."""
    if not all(holds(condition, on) for condition in module.conditions):
        return
    sizes = tuple(_evaluate(size, widths) for size in module.sizes)
    if module.kind == "stacked-experts":
        yield Tensor(module.name, sizes, "experts")
        return
    as_written = module.transposed or module.kind in ("norm", "embedding")
    yield Tensor(f"{module.name}.weight", sizes if as_written else sizes[::-1], module.kind)
    bias = module.bias
    if bias is not None and (not bias or any(holds(flag, on) for flag in bias)):
        yield Tensor(f"{module.name}.bias", sizes[-1:], module.kind)


def _evaluate(expression: str, widths: dict[str, int]) -> int:
    """A sum of products of numbers and widths, such as "q+2*kv"."""
    terms = (term.split("*") for term in expression.split("+"))
    return sum(prod(widths[f] if f in widths else int(f) for f in term) for term in terms)
