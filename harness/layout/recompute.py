"""What is computed again: which decoder layers, and logits a part of the vocabulary at a time."""

from __future__ import annotations

from typing import Literal

from harness.layout.shape import Shape, Tensor, flops_per_unit

WAYS: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
REVERSIBLE: Literal["reversible"] = "reversible"
"""Key of a model config that is true if its decoder layers have two streams, from which the
backward pass computes their inputs (model.reversible); and that way of checkpointing."""
Checkpointing = Literal["none", "selective", "full", "reversible"] | int
"""Activation checkpointing of no decoder layer, of all but the costly results of every layer, of
every layer, with and without its input, or of every N-th layer."""


def is_checkpointed(checkpointing: Checkpointing, layer: int) -> bool:
    """Return True if a layer, counted from 0 over the whole model, keeps not all that its backward
    pass needs.
    """
    if isinstance(checkpointing, int):
        return layer % checkpointing == 0
    return checkpointing != "none"


def runs_again(checkpointing: Checkpointing, layer: int) -> bool:
    """Return True if a layer's matrix products are computed again in the backward pass."""
    return checkpointing != "selective" and is_checkpointed(checkpointing, layer)


def flops_again(
    shape: Shape, seq_len: int, checkpointing: Checkpointing, mlp_tiles: int = 1
) -> list[int]:
    """Return the operations per token of each of `Body.units` that the backward pass repeats.

    A layer's forward pass is a third of its operations.  An MLP in tiles is repeated tile by tile;
    where its layer is checkpointed, too, that repeats all but the last tile once more.
    """
    again = [0]
    for index, (flops, tensors) in enumerate(
        zip(flops_per_unit(shape, seq_len)[1:-1], shape.body.layers, strict=True)
    ):
        layer = flops // 3 if runs_again(checkpointing, index) else 0
        if mlp_tiles > 1:
            mlp = 2 * matrix_elements(tensors)
            layer += mlp
            if checkpointing == REVERSIBLE:  # runs to its end
                pass
            elif runs_again(checkpointing, index):
                layer -= mlp // mlp_tiles
            elif is_checkpointed(checkpointing, index):
                layer += mlp - mlp // mlp_tiles
        again.append(layer)
    return [*again, 0]


def matrix_elements(layer: tuple[Tensor, ...]) -> int:
    """Return the elements of the matrices of a layer's dense MLP."""
    return sum(t.numel for t in layer if t.kind == "mlp" and len(t.shape) == 2)


_FP32 = 4  # bytes
MOST_WHOLE_BYTES = 2**30
"""The largest fp32 logits of a rank's micro-batch that are held whole; the loss needs three times
as much in its backward pass."""
CHUNK_BYTES = 2**28
"""fp32 logits of a chunk: small beside a layer's activations of as many tokens, and products still
large enough for a GPU. A chunk's logits are computed twice, a third of the head's work more."""
_MULTIPLE = 128  # columns, as matrix products like them


def loss_chunk(wanted: int | None, vocab_size: int, tokens: int) -> int:
    """Return how many entries of a rank's vocabulary a chunk has; 0 where all are taken at once.

    `wanted`: model.loss_chunk. `tokens`: of a micro-batch on the rank.
    """
    if wanted is not None:
        return wanted
    if _FP32 * vocab_size * tokens <= MOST_WHOLE_BYTES:
        return 0
    return max(1, CHUNK_BYTES // (_FP32 * tokens * _MULTIPLE)) * _MULTIPLE
