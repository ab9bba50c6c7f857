"""A decoder's shape: its sizes and every parameter, read from its HF config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from harness.layout.sizes import Keys, Sizes, read_sizes
from harness.layout.tensors import Body, Tensor, build_body


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


def _active_per_unit(shape: Shape) -> list[int]:
    """Return the active parameters of each of `Body.units`; a tied head is work of the last."""
    totals = []
    for unit in shape.body.units:
        experts = sum(tensor.numel for tensor in unit if tensor.kind == "experts")
        totals.append(experts * shape.experts_per_token // (shape.num_experts or 1))
        totals[-1] += sum(
            tensor.numel
            for tensor in unit
            if tensor.kind not in ("embedding", "experts") and len(tensor.shape) == 2
        )
    if shape.tied:
        totals[-1] += shape.body.before[0].numel
    return totals


def flops_per_token(shape: Shape, seq_len: int) -> float:
    """Floating-point operations that training spends on one token of a `seq_len`-token sequence.

    `6 * active_parameters + 12 * sum over layers of q_size * context`: a multiply and an add per
    weight, once forward and twice backward; for attention, scores and weighted values likewise.
    PaLM's convention (arXiv 2204.02311, appendix B): attention counts as if each token saw
    `context` tokens, **without halving for the causal mask**, and recomputation under activation
    checkpointing is not counted.  `context` is seq_len, or a layer's sliding window if shorter.

    MFU = tokens per second x this / peak operations per second.
    """
    return float(sum(flops_per_unit(shape, seq_len)))


def flops_per_unit(shape: Shape, seq_len: int) -> list[int]:
    """Return the operations of each of `Body.units`: before the layers, every layer, after them."""
    contexts = (min(seq_len, window or seq_len) for window in shape.sliding_windows)
    attention = [0, *(12 * shape.q_size * context for context in contexts), 0]
    weights = _active_per_unit(shape)
    return [6 * active + scores for active, scores in zip(weights, attention, strict=True)]
