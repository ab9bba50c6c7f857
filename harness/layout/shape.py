"""A decoder's shape: its sizes and every parameter by name, shape and kind.

Names and shapes, not totals, because DeepSpeed shards, buckets and pads whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from harness.layout.families import Keys, Module, Sizes, flags_on, holds, read_sizes


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


@dataclass(frozen=True)
class Shape(Sizes):
    """Sizes, and the tensors that they come to."""

    body: Body = field(repr=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all sizes and tensors, of which there are thousands: taken once."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def parameters(self) -> int:
        """Parameters of all tensors; a tied embedding has one tensor, and counts once."""
        return sum(tensor.numel for unit in self.body.units for tensor in unit)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Shape:
        """The shape of a model from the keys of its HF `config.json`.

        Raises UnknownArchitecture for a `model_type` that families.toml lacks, and ValueError
        naming every key that is missing or makes no sense.
        """
        keys = Keys(config)
        sizes = read_sizes(keys)
        body = build_body(sizes, keys)
        if keys.problems:
            raise ValueError(f"{sizes.model_type} config: {'; '.join(keys.problems)}")
        return cls(**vars(sizes), body=body)

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter under its full name, in the order of the forward pass."""
        yield from self.body.before
        for index, layer in enumerate(self.body.layers, self.body.first_layer):
            for tensor in layer:
                name = f"{self.body.layer_prefix}{index}.{tensor.name}"
                yield Tensor(name, tensor.shape, tensor.kind)
        yield from self.body.after


Seen = Callable[[int], float]
"""Tokens that attention counts for one token of so many, before a layer's window
(layout/attention_table.py: seen_by)."""


def all_tokens(seq_len: int) -> float:
    """Exact attention's."""
    return seq_len


def num_parameters(shape: Shape) -> int:
    """Parameters of the whole model, a tied embedding counted once."""
    return shape.parameters


def parameters_by_kind(shape: Shape) -> dict[str, int]:
    """Parameters per kind (`Tensor.kind`); a kind that the model lacks is not there."""
    totals: dict[str, int] = {}
    for tensor in shape.tensors():
        totals[tensor.kind] = totals.get(tensor.kind, 0) + tensor.numel
    return totals


def parameters_per_layer(shape: Shape) -> tuple[int, ...]:
    """Parameters of each decoder layer; embeddings, final norm and head are in none of them."""
    return tuple(sum(tensor.numel for tensor in layer) for layer in shape.body.layers)


def active_parameters(shape: Shape) -> int:
    """Weights that multiply one token: matrices, the head even if tied, the chosen experts.

    Lookups (embeddings, positions), norms and biases do no multiplication worth counting.
    """
    return sum(_active_per_unit(shape))


@lru_cache(maxsize=256)
def _active_per_unit(shape: Shape) -> list[int]:
    """Return the active parameters of each of `Body.units`; a tied head is work of the last."""
    totals = []
    for unit in shape.body.units:
        experts = sum(tensor.numel for tensor in unit if tensor.kind == "experts")
        totals.append(experts * shape.experts_per_token // (shape.num_experts or 1))
        totals[-1] += sum(
            tensor.numel * shape.experts_per_token // tensor.shape[0]
            for tensor in unit
            if is_stacked(tensor)
        )
        totals[-1] += sum(
            tensor.numel
            for tensor in unit
            if tensor.kind not in ("embedding", "experts") and len(tensor.shape) == 2
        )
    if shape.tied:
        totals[-1] += shape.body.before[0].numel
    return totals


def is_stacked(tensor: Tensor) -> bool:
    """Return True for the matrices of all experts of a family that is not known tensor by tensor,
    of which a token is multiplied by those that it chose.
    """
    return tensor.kind == "mlp" and len(tensor.shape) == 3 and "experts" in tensor.name


def attention_width(shape: Shape, layer: tuple[Tensor, ...]) -> int:
    """Return the width of all queries of a layer together; 0 of a layer without attention.

    Where keys and values come from one latent vector, heads have two widths: the mean of both
    (arXiv 2405.04434, 2.1: queries of `q_b_proj` or `q_proj`, values of `o_proj`).
    """
    attention = (t for t in layer if t.kind == "attention" and len(t.shape) == 2)
    matrices = {t.name.removesuffix(".weight").rpartition(".")[2]: t for t in attention}
    if not matrices:
        return 0
    if "kv_b_proj" not in matrices or "o_proj" not in matrices:
        return shape.q_size
    queries = matrices.get("q_b_proj") or matrices["q_proj"]
    return (queries.shape[0] + matrices["o_proj"].shape[1]) // 2


@lru_cache(maxsize=256)
def _widths(shape: Shape) -> tuple[int, ...]:
    return tuple(attention_width(shape, layer) for layer in shape.body.layers)


def flops_per_token(shape: Shape, seq_len: int, seen: Seen = all_tokens) -> float:
    """Floating-point operations that training spends on one token of a `seq_len`-token sequence.

    `6 * active_parameters + 12 * sum over layers of q_size * context`: a multiply and an add per
    weight, once forward and twice backward; for attention, scores and weighted values likewise.
    PaLM's convention (arXiv 2204.02311, appendix B): attention counts as if each token saw
    `context` tokens, **without halving for the causal mask**, and recomputation under activation
    checkpointing is not counted.  `context` is what `seen` says of seq_len, or a layer's sliding
    window if shorter; layers without attention have none, and the few operations of their states
    are left out.

    MFU = tokens per second x this / peak operations per second.
    """
    return float(sum(flops_per_unit(shape, seq_len, seen)))


def flops_per_unit(shape: Shape, seq_len: int, seen: Seen = all_tokens) -> list[int]:
    """Return the operations of each of `Body.units`: before the layers, every layer, after them."""
    most = seen(seq_len)
    attention = (
        int(12 * width * min(most, window or most))
        for width, window in zip(_widths(shape), shape.sliding_windows, strict=True)
    )
    weights = _active_per_unit(shape)
    return [6 * active + scores for active, scores in zip(weights, [0, *attention, 0], strict=True)]
