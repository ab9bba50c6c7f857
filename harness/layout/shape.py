"""A decoder's shape: its sizes, and the name, shape and kind of every parameter.

Totals would not suffice, because DeepSpeed shards, buckets and pads whole parameters.
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
    """A parameter: its name in the model or in its layer, and its shape."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """embedding, attention, states (recurrent layers), mlp, router, experts, norm, projection or
    head; a bias has the kind of its weight.
    """

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Body:
    """A model's tensors in the order in which the forward pass uses them."""

    before: tuple[Tensor, ...]
    """Embeddings and anything before the layers; full names."""
    layer_prefix: str
    """Prefix of a layer's name before its index, such as "model.layers."."""
    layers: tuple[tuple[Tensor, ...], ...]
    """Tensors of each layer; names within the layer."""
    after: tuple[Tensor, ...]
    """Final norm and head; full names. A tied head has no tensor."""
    first_layer: int = 0
    """Index of the first of `layers` in the whole model."""

    @property
    def units(self) -> tuple[tuple[Tensor, ...], ...]:
        """The units of a pipeline: before the layers, each layer, after the layers."""
        return self.before, *self.layers, self.after


def build_body(sizes: Sizes, keys: Keys) -> Body:
    """Return the tensors of the model's family; families.toml describes the grammar."""
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
    """Return, for each layer, True if it has experts instead of an MLP (Qwen3-MoE mixes both)."""
    sparse_step = keys.size("decoder_sparse_step", default=1)
    dense = keys.config.get("mlp_only_layers") or ()
    return [
        sizes.num_experts > 0 and layer not in dense and (layer + 1) % sparse_step == 0
        for layer in range(sizes.num_layers)
    ]


def _tensors(module: Module, on: set[str], widths: dict[str, int]) -> Iterator[Tensor]:
    """Yield the weight and, if any, the bias of a module, given the flags that are on."""
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
    """Return the value of a sum of products of numbers and widths, such as "q+2*kv"."""
    terms = (term.split("*") for term in expression.split("+"))
    return sum(prod(widths[f] if f in widths else int(f) for f in term) for term in terms)


@dataclass(frozen=True)
class Shape(Sizes):
    """Sizes and the tensors that result from them."""

    body: Body = field(repr=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all sizes and of thousands of tensors, computed once."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(tensor.numel for unit in self.body.units for tensor in unit)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Shape:
        """Return the shape of a model from the keys of its HF `config.json`.

        Raises UnknownArchitecture for a `model_type` that families.toml lacks, and ValueError
        naming every missing or invalid key.
        """
        keys = Keys(config)
        sizes = read_sizes(keys)
        body = build_body(sizes, keys)
        if keys.problems:
            raise ValueError(f"{sizes.model_type} config: {'; '.join(keys.problems)}")
        return cls(**vars(sizes), body=body)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every parameter under its full name, in forward order."""
        yield from self.body.before
        for index, layer in enumerate(self.body.layers, self.body.first_layer):
            for tensor in layer:
                name = f"{self.body.layer_prefix}{index}.{tensor.name}"
                yield Tensor(name, tensor.shape, tensor.kind)
        yield from self.body.after


Seen = Callable[[int], float]
"""Number of tokens that attention counts per token of a sequence of this length, before a layer's
sliding window (layout/attention_table.py: seen_by).
"""


def all_tokens(seq_len: int) -> float:
    """Return `seq_len`: exact attention counts every token."""
    return seq_len


def num_parameters(shape: Shape) -> int:
    """Return the number of parameters in a shape; a tied embedding counts once."""
    return shape.parameters


def parameters_by_kind(shape: Shape) -> dict[str, int]:
    """Return the number of parameters of each kind (`Tensor.kind`) that the model has."""
    totals: dict[str, int] = {}
    for tensor in shape.tensors():
        totals[tensor.kind] = totals.get(tensor.kind, 0) + tensor.numel
    return totals


def active_parameters(shape: Shape) -> int:
    """Return the number of weights multiplied per token: in matrices, the head even if tied, and
    the chosen experts.

    Lookups (embeddings, positions), norms and biases are negligible.
    """
    return sum(_active_per_unit(shape))


@lru_cache(maxsize=256)
def _active_per_unit(shape: Shape) -> list[int]:
    """Return the active parameters of each of `Body.units`; a tied head counts in the last."""
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
    """Return True for stacked experts of a traced family, of which a token uses a few."""
    return tensor.kind == "mlp" and len(tensor.shape) == 3 and "experts" in tensor.name


def attention_width(shape: Shape, layer: tuple[Tensor, ...]) -> int:
    """Return the total width of a layer's queries; 0 without attention.

    With multi-head latent attention, query-key and value heads differ in width; the mean is
    returned (arXiv 2405.04434, section 2.1: queries of `q_b_proj` or `q_proj`, values of `o_proj`).
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
    """Return the training FLOPs per token of a sequence of `seq_len` tokens.

    `6 * active_parameters + 12 * sum over layers of q_size * context`: a multiply and an add per
    weight, once forward and twice backward; the same for attention scores and weighted values. This
    is PaLM's convention (arXiv 2204.02311, appendix B): attention counts as if each token saw
    `context` tokens, **without halving for the causal mask**, and recomputation under activation
    checkpointing is not counted. `context` is `seen(seq_len)`, or a layer's sliding window if that
    is shorter. Layers without attention have none, and the few operations on their states are
    omitted.

    MFU = tokens per second x this / peak FLOP/s.
    """
    return float(sum(flops_per_unit(shape, seq_len, seen)))


def flops_per_unit(shape: Shape, seq_len: int, seen: Seen = all_tokens) -> list[int]:
    """Return the FLOPs per token of each of `Body.units`."""
    context = seen(seq_len)
    attention = (
        int(12 * width * min(context, window or context))
        for width, window in zip(_widths(shape), shape.sliding_windows, strict=True)
    )
    weights = _active_per_unit(shape)
    return [6 * active + scores for active, scores in zip(weights, [0, *attention, 0], strict=True)]
