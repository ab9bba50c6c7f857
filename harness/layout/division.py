"""A model divided over tensor-parallel ranks, as AutoTP of DeepSpeed 0.19.8 divides it."""

from __future__ import annotations

from dataclasses import replace

from harness.layout.box import Part, Range, share_of
from harness.layout.shape import Shape
from harness.layout.share import Cutter
from harness.layout.tensors import Tensor

Ranges = tuple[Range, ...]


def autotp_cutter(shape: Shape) -> Cutter:
    """Return the function that gives a tensor-parallel rank its rows or columns of a parameter.

    Attention is divided by groups of heads with a common key, the rest evenly, whole pieces first
    (module_inject/tp_shard.py, get_shard_size). Norms are whole on every rank, and so are
    embeddings, except one tied to the head: then a rank has a part of the vocabulary and of the
    logits.
    """
    kinds = {tensor.name: tensor.kind for tensor in shape.tensors()}

    def cut(name: str, sizes: tuple[int, ...], place: int, places: int) -> dict[int, Ranges]:
        return _cuts(shape, Tensor(name, sizes, kinds[name]), place, places)

    return cut


def tensor_shard(shape: Shape, ranks: int) -> Shape:
    """Return the part of a model on the first of `ranks` tensor-parallel ranks: the largest one."""
    if ranks == 1:
        return shape

    def cut(tensor: Tensor) -> Tensor:
        part = Part.of(tensor.shape)
        for dimension, ranges in _cuts(shape, tensor, 0, ranks).items():
            part = part.cut(dimension, ranges)
        return replace(tensor, shape=part.shape)

    def first(kind: str, size: int) -> int:
        return _length(_ranges(shape, kind, size, 0, ranks))

    body, has_part = shape.body, divides_vocabulary(shape)
    return replace(
        shape,
        num_heads=first("attention", shape.num_heads),
        num_kv_heads=first("attention", shape.num_kv_heads),
        intermediate_size=first("mlp", shape.intermediate_size),
        vocab_size=first("head", shape.vocab_size) if has_part else shape.vocab_size,
        body=replace(
            body,
            before=tuple(map(cut, body.before)),
            layers=tuple(tuple(map(cut, layer)) for layer in body.layers),
            after=tuple(map(cut, body.after)),
        ),
    )


def _cuts(shape: Shape, tensor: Tensor, place: int, places: int) -> dict[int, Ranges]:
    """Return the ranges of the divided dimension; none for a tensor that is not divided."""
    tied_only = tensor.kind == "embedding" and not shape.tied
    *_, module, parameter = tensor.name.split(".")
    by_input = module in shape.family.autotp_inputs
    if tensor.kind not in divided_kinds(shape) or tied_only or (by_input and parameter == "bias"):
        return {}
    dimension = int(by_input)
    return {dimension: _ranges(shape, tensor.kind, tensor.shape[dimension], place, places)}


def _ranges(shape: Shape, kind: str, size: int, place: int, places: int) -> Ranges:
    """Return a rank's ranges of a dimension of a tensor of this kind."""
    by_heads = kind == "attention" or (kind == "mlp" and shape.family.autotp_mlp_by_heads)
    width, left = divmod(size, shape.num_kv_heads)
    if left or not by_heads:
        return share_of(size, place, places)
    heads = share_of(shape.num_kv_heads, place, places)
    return tuple((start * width, stop * width) for start, stop in heads)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def divided_kinds(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of tensors that AutoTP divides; none if it does not support the family."""
    return shape.family.autotp


def divides_vocabulary(shape: Shape) -> bool:
    """Return True if a tensor-parallel rank has the logits of only a part of the vocabulary."""
    return shape.tied and "embedding" in divided_kinds(shape)
