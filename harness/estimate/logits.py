"""Memory of the loss: logits and their gradients."""

from __future__ import annotations

from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import FP32, MemoryItem

INDEX = 8
"""Bytes of an int64."""


def log_softmax(inputs: Inputs) -> int:
    """Return the bytes of log-probabilities (in chunks, of sums), labels and the total weight."""
    if inputs.fuses_loss:
        return FP32 * inputs.tokens
    if inputs.chunk:
        return (FP32 + INDEX) * inputs.tokens
    each = INDEX + 2 * inputs.divides_vocabulary  # masks: local ids, and targets
    return (FP32 * inputs.shape.vocab_size + each) * inputs.tokens


def logits(inputs: Inputs) -> list[MemoryItem]:
    """Return the loss in phases: forward 2V + 4V + 4V bytes per token (16-bit), backward 4V + 4V +
    4V.

    models/loss.py frees the logits before the backward pass; keeping the model's output would add
    2V.
    """
    vocabulary = inputs.shape.vocab_size * inputs.tokens
    e = inputs.element_bytes
    half = e != FP32
    saved = log_softmax(inputs)
    if inputs.fuses_loss:
        return _fused(inputs)
    if inputs.chunk:
        return _logits_in_chunks(inputs, saved)
    if inputs.divides_vocabulary:
        # models/vocabulary_loss.py: logits, in fp32, minus their maximum, and the exponentials.
        whole = (e + (FP32 if half else 0) + 2 * FP32) * vocabulary
        return [
            MemoryItem("logits and loss", saved, frozenset({"forward"}), "read"),
            MemoryItem("logits and loss", whole, frozenset({"loss", "evaluation"}), "read"),
        ]
    forward = (e + (FP32 if half else 0)) * vocabulary
    backward = 2 * FP32 * vocabulary
    evaluation = forward + FP32 * vocabulary
    return [
        MemoryItem("logits and loss", saved, frozenset({"loss"}), "traced"),
        MemoryItem("logits and loss", max(forward, backward), frozenset({"loss"}), "traced"),
        MemoryItem("logits and loss", saved, frozenset({"forward"}), "traced"),
        MemoryItem("logits and loss", evaluation, frozenset({"evaluation"}), "traced"),
    ]


def _fused(inputs: Inputs) -> list[MemoryItem]:
    """Return the memory of liger_kernel/ops/fused_linear_cross_entropy.py. Its forward pass already
    computes the gradients of hidden states and head, for a power of two of tokens at a time, whose
    logits are about as large as all hidden states; the gradient of the logits overwrites them. The
    head's gradient is accumulated in fp32 (models/loss.py) and cast at the end.
    """
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    parts = -(-shape.vocab_size // shape.hidden_size)
    rows = min(tokens, 1 << (-(-tokens // parts) - 1).bit_length())
    of_hidden, of_head = e * shape.hidden_size * tokens, e * shape.hidden_size * shape.vocab_size
    sums = FP32 * shape.hidden_size * shape.vocab_size
    most = of_hidden + sums + max(of_head if e != FP32 else 0, e * shape.vocab_size * rows)
    # Evaluation is not fused.
    whole = (e + (FP32 if e != FP32 else 0) + FP32) * shape.vocab_size * tokens
    evaluation = _chunk_forward(inputs) if inputs.chunk else whole
    return [
        MemoryItem("logits and loss", most, frozenset({"loss"}), "read"),
        MemoryItem("logits and loss", of_hidden + of_head, frozenset({"forward"}), "read"),
        MemoryItem("logits and loss", evaluation, frozenset({"evaluation"}), "traced"),
    ]


def _logits_in_chunks(inputs: Inputs, saved: int) -> list[MemoryItem]:
    """Return the memory of models/chunked_loss.py: a chunk of logits, in the backward pass together
    with the head's gradient and the fp32 gradient of the hidden states.
    """
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    chunk = min(inputs.chunk, shape.vocab_size) * tokens
    stream, half = shape.hidden_size * tokens, e != FP32
    cast = e + FP32 if half else FP32
    # A soft cap keeps the product, tanh's output and the logits beside slopes and gradients.
    capped = shape.family.soft_caps
    slope = max(4 * e + FP32, 6 * e) if capped else cast
    backward = FP32 * stream + max(slope * chunk, e * (chunk + stream), e * stream * half)
    gradient = e * shape.vocab_size * shape.hidden_size
    forward = _chunk_forward(inputs)
    return [
        MemoryItem("logits and loss", saved, frozenset({"loss", "forward"}), "traced"),
        MemoryItem(
            "logits and loss", max(forward, backward + gradient), frozenset({"loss"}), "traced"
        ),
        MemoryItem("logits and loss", forward, frozenset({"evaluation"}), "traced"),
    ]


def _chunk_forward(inputs: Inputs) -> int:
    """Return the bytes of a chunk of logits in a forward pass."""
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    cast = e + FP32 if e != FP32 else FP32
    each = max(cast, 2 * e) if shape.family.soft_caps else cast
    return each * min(inputs.chunk, shape.vocab_size) * tokens + 5 * FP32 * tokens
