"""A model divided over tensor-parallel ranks, and its sequences over sequence-parallel ones.

As AutoTP and Ulysses of DeepSpeed 0.19.8 divide them.
"""

from __future__ import annotations

from dataclasses import replace

from harness.planning.grid import Grid
from harness.planning.shape import Shape
from harness.planning.sizes import FAMILIES
from harness.planning.tensors import Tensor

# Modules whose input is divided; of all other linear layers it is the output.
_BY_INPUT = {"o_proj", "out_proj", "dense", "down_proj", "dense_4h_to_h", "fc2"}


def tensor_shard(shape: Shape, ranks: int) -> Shape:
    """The part of a model that the first of `ranks` tensor-parallel ranks holds; none holds more.

    Attention is divided by groups of heads with a common key, the rest evenly, whole pieces first
    (module_inject/tp_shard.py, get_shard_size). Norms are whole on every rank, and so are
    embeddings, but for one that is the head as well: then a rank has a part of the vocabulary and
    of the logits.
    """
    if ranks == 1:
        return shape
    kinds = _divided_kinds(shape)
    groups = _part(shape.num_kv_heads, ranks)

    def share(kind: str, size: int) -> int:
        if kind == "attention":
            return size * groups // shape.num_kv_heads
        return _part(size, ranks)

    def cut(tensor: Tensor) -> Tensor:
        whole = tensor.kind not in kinds or (tensor.kind == "embedding" and not shape.tied)
        *_, module, what = tensor.name.split(".")
        by_input = module in _BY_INPUT
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
        intermediate_size=_part(shape.intermediate_size, ranks),
        vocab_size=(
            _part(shape.vocab_size, ranks)
            if shape.tied and "embedding" in kinds
            else shape.vocab_size
        ),
        body=replace(
            body,
            before=tuple(map(cut, body.before)),
            layers=tuple(tuple(map(cut, layer)) for layer in body.layers),
            after=tuple(map(cut, body.after)),
        ),
    )


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _divided_kinds(shape: Shape) -> list[str]:
    kinds: list[str] = FAMILIES.get(shape.model_type, {}).get("autotp", [])
    return kinds


def division_problems(shape: Shape, grid: Grid, seq_len: int) -> list[str]:
    """Why DeepSpeed cannot divide a model so (engine.py; ulysses_sp.py, __init__)."""
    problems = []
    if grid.tensor > 1 and not _divided_kinds(shape):
        known = ", ".join(name for name, family in FAMILIES.items() if family.get("autotp"))
        problems.append(
            f"tensor_parallel.autotp_size is {grid.tensor}: DeepSpeed cannot divide "
            f"{shape.model_type}, only {known}"
        )
    if grid.tensor > shape.num_heads:
        problems.append(
            f"tensor_parallel.autotp_size is {grid.tensor}: the model has {shape.num_heads} "
            "attention heads"
        )
    ranks, kv_heads = grid.sequence, shape.num_kv_heads
    named = f"sequence_parallel_size is {ranks}"
    if shape.num_heads % ranks:
        problems.append(f"{named}: it must divide {shape.num_heads} attention heads")
    if kv_heads % ranks and ranks % kv_heads:
        problems.append(f"{named}: it must divide {kv_heads} key heads, or they it")
    if seq_len % ranks:
        problems.append(f"{named}: it must divide data.seq_len, {seq_len}")
    return problems
