"""A model divided over tensor-parallel ranks, as AutoTP of DeepSpeed 0.19.8 divides it."""

from __future__ import annotations

from dataclasses import replace

from harness.layout.shape import Shape
from harness.layout.tensors import Tensor


def tensor_shard(shape: Shape, ranks: int) -> Shape:
    """The part of a model that the first of `ranks` tensor-parallel ranks holds; none holds more.

    Attention is divided by groups of heads with a common key, the rest evenly, whole pieces first
    (module_inject/tp_shard.py, get_shard_size). Norms are whole on every rank, and so are
    embeddings, but for one that is the head as well: then a rank has a part of the vocabulary and
    of the logits.
    """
    if ranks == 1:
        return shape
    kinds, heads, family = divided_kinds(shape), shape.num_kv_heads, shape.family
    groups = _part(heads, ranks)

    def share(kind: str, size: int) -> int:
        """Return the first rank's part of a dimension of a tensor of this kind."""
        by_heads = kind == "attention" or (kind == "mlp" and family.autotp_mlp_by_heads)
        return size * groups // heads if by_heads and size % heads == 0 else _part(size, ranks)

    def cut(tensor: Tensor) -> Tensor:
        """The first rank's part of a tensor: the tensor itself where it is not divided."""
        whole = tensor.kind not in kinds or (tensor.kind == "embedding" and not shape.tied)
        *_, module, what = tensor.name.split(".")
        by_input = module in family.autotp_inputs
        if whole or (by_input and what == "bias"):
            return tensor
        first, *others = tensor.shape
        if by_input:
            return replace(tensor, shape=(first, share(tensor.kind, others[0])))
        return replace(tensor, shape=(share(tensor.kind, first), *others))

    body = shape.body
    return replace(
        shape,
        num_heads=share("attention", shape.num_heads),
        num_kv_heads=groups,
        intermediate_size=share("mlp", shape.intermediate_size),
        vocab_size=_part(shape.vocab_size, ranks if divides_vocabulary(shape) else 1),
        body=replace(
            body,
            before=tuple(map(cut, body.before)),
            layers=tuple(tuple(map(cut, layer)) for layer in body.layers),
            after=tuple(map(cut, body.after)),
        ),
    )


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def divided_kinds(shape: Shape) -> tuple[str, ...]:
    """Kinds of tensors that AutoTP divides; none where it cannot divide the family."""
    return shape.family.autotp


def divides_vocabulary(shape: Shape) -> bool:
    """Return whether a tensor-parallel rank has logits of a part of the vocabulary only."""
    return shape.tied and "embedding" in divided_kinds(shape)
