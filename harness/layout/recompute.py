"""Recomputation: activation checkpointing of decoder layers, and the loss in vocabulary chunks."""

from typing import Literal

from harness.layout.shape import Shape, Tensor, flops_per_unit

WAYS: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
REVERSIBLE: Literal["reversible"] = "reversible"
"""The value of reversible checkpointing, and a model config key: true if the decoder layers have
two streams, from which the backward pass reconstructs their inputs (model.reversible).
"""
Checkpointing = Literal["none", "selective", "full", "reversible"] | int
"""Activation checkpointing: no layer; every layer, except for its expensive results; every layer;
every layer, even its input; or (int) every N-th layer.
"""


def is_checkpointed(checkpointing: Checkpointing, layer: int) -> bool:
    """Return True if a layer of the model does not save all that its backward pass needs."""
    if isinstance(checkpointing, int):
        return layer % checkpointing == 0
    return checkpointing != "none"


def runs_again(checkpointing: Checkpointing, layer: int) -> bool:
    """Return True if the backward pass recomputes a layer's matrix products."""
    return checkpointing != "selective" and is_checkpointed(checkpointing, layer)


def flops_again(
    shape: Shape, seq_len: int, checkpointing: Checkpointing, mlp_tiles: int = 1
) -> list[int]:
    """Return the FLOPs per token of each of `Body.units` that the backward pass recomputes.

    A layer's forward pass is a third of its FLOPs. A tiled MLP is recomputed tile by tile; if its
    layer is also checkpointed, all but the last tile are recomputed once more.
    """
    again = [0]
    for index, (flops, tensors) in enumerate(
        zip(flops_per_unit(shape, seq_len)[1:-1], shape.body.layers, strict=True)
    ):
        layer = flops // 3 if runs_again(checkpointing, index) else 0
        if mlp_tiles > 1:
            mlp = 2 * matrix_elements(tensors)
            layer += mlp
            if checkpointing == REVERSIBLE:  # recomputes the last tile, too
                pass
            elif runs_again(checkpointing, index):
                layer -= mlp // mlp_tiles
            elif is_checkpointed(checkpointing, index):
                layer += mlp - mlp // mlp_tiles
        again.append(layer)
    return [*again, 0]


def matrix_elements(layer: tuple[Tensor, ...]) -> int:
    """Return the number of elements of the dense MLP's matrices in a layer."""
    return sum(t.numel for t in layer if t.kind == "mlp" and len(t.shape) == 2)


_FP32 = 4  # bytes
MOST_WHOLE_BYTES = 2**30
"""Largest fp32 logits of a rank's micro-batch that are not chunked; the loss needs three times as
much in its backward pass.
"""
CHUNK_BYTES = 2**28
"""Bytes of a chunk's fp32 logits: small compared with a layer's activations for as many tokens, yet
large enough for efficient matrix products. A chunk's logits are computed twice, which adds a third
to the head's FLOPs.
"""
_MULTIPLE = 128  # columns, for efficient matrix products


def loss_chunk(wanted: int | None, vocab_size: int, tokens: int) -> int:
    """Return the number of vocabulary entries per chunk of the loss; 0 for no chunks.

    `wanted`: model.loss_chunk. `vocab_size`: on this rank. `tokens`: of a micro-batch on this rank.
    """
    if wanted is not None:
        return wanted
    if _FP32 * vocab_size * tokens <= MOST_WHOLE_BYTES:
        return 0
    return max(1, CHUNK_BYTES // (_FP32 * tokens * _MULTIPLE)) * _MULTIPLE
