"""Memory of the loss: logits, and the gradients of those."""

from __future__ import annotations

from harness.estimate.held import FP32, Held
from harness.estimate.inputs import Inputs

INDEX = 8
"""Bytes of an int64."""


def log_softmax(inputs: Inputs) -> int:
    """The probabilities' logarithms in fp32, the labels, and the weight they sum to; in chunks only
    the logarithm of their sum.
    """
    if inputs.fuses_loss:
        return FP32 * inputs.tokens
    if inputs.chunk:
        return (FP32 + INDEX) * inputs.tokens
    each = INDEX + 2 * inputs.divides_vocabulary  # which ids are here, and which are targets
    return (FP32 * inputs.shape.vocab_size + each) * inputs.tokens


def logits(inputs: Inputs) -> list[Held]:
    """The loss in phases: forward 2V + 4V + 4V bytes a token (16-bit), backward 4V + 4V + 4V.

    models/loss.py drops the logits before the backward pass; a caller that keeps the model's output
    would add its 2V.
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
        # models/vocabulary_loss.py: logits, in fp32, less their largest, and its exponential.
        whole = (e + (FP32 if half else 0) + 2 * FP32) * vocabulary
        return [
            Held("logits and loss", saved, frozenset({"forward"}), "read"),
            Held("logits and loss", whole, frozenset({"loss", "evaluation"}), "read"),
        ]
    forward = (e + (FP32 if half else 0)) * vocabulary
    backward = 2 * FP32 * vocabulary
    evaluation = forward + FP32 * vocabulary
    return [
        Held("logits and loss", saved, frozenset({"loss"}), "traced"),
        Held("logits and loss", max(forward, backward), frozenset({"loss"}), "traced"),
        Held("logits and loss", saved, frozenset({"forward"}), "traced"),
        Held("logits and loss", evaluation, frozenset({"evaluation"}), "traced"),
    ]


def _fused(inputs: Inputs) -> list[Held]:
    """liger_kernel/ops/fused_linear_cross_entropy.py: the forward pass computes the gradients of
    hidden states and head already, over a power of two of tokens at a time whose logits are about
    as many as all hidden states; their gradient is written over them. The head's is added up in
    fp32 (models/loss.py), and cast at the end.
    """
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    parts = -(-shape.vocab_size // shape.hidden_size)
    rows = min(tokens, 1 << (-(-tokens // parts) - 1).bit_length())
    of_hidden, of_head = e * shape.hidden_size * tokens, e * shape.hidden_size * shape.vocab_size
    sums = FP32 * shape.hidden_size * shape.vocab_size
    most = of_hidden + sums + max(of_head if e != FP32 else 0, e * shape.vocab_size * rows)
    # An evaluation is not fused.
    whole = (e + (FP32 if e != FP32 else 0) + FP32) * shape.vocab_size * tokens
    evaluation = _chunk_forward(inputs) if inputs.chunk else whole
    return [
        Held("logits and loss", most, frozenset({"loss"}), "read"),
        Held("logits and loss", of_hidden + of_head, frozenset({"forward"}), "read"),
        Held("logits and loss", evaluation, frozenset({"evaluation"}), "traced"),
    ]


def _logits_in_chunks(inputs: Inputs, saved: int) -> list[Held]:
    """models/chunked_loss.py: a chunk of logits, in the backward pass beside the head's gradient
    and fp32 sums of the hidden states'.
    """
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    chunk = min(inputs.chunk, shape.vocab_size) * tokens
    stream, half = shape.hidden_size * tokens, e != FP32
    cast = e + FP32 if half else FP32
    # What caps logits keeps the product, tanh's output and the logits beside slopes and gradients.
    capped = shape.family.soft_caps
    slope = max(4 * e + FP32, 6 * e) if capped else cast
    backward = FP32 * stream + max(slope * chunk, e * (chunk + stream), e * stream * half)
    gradient = e * shape.vocab_size * shape.hidden_size
    forward = _chunk_forward(inputs)
    return [
        Held("logits and loss", saved, frozenset({"loss", "forward"}), "traced"),
        Held("logits and loss", max(forward, backward + gradient), frozenset({"loss"}), "traced"),
        Held("logits and loss", forward, frozenset({"evaluation"}), "traced"),
    ]


def _chunk_forward(inputs: Inputs) -> int:
    """The bytes of a chunk of logits in a forward pass."""
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    cast = e + FP32 if e != FP32 else FP32
    each = max(cast, 2 * e) if shape.family.soft_caps else cast
    return each * min(inputs.chunk, shape.vocab_size) * tokens + 5 * FP32 * tokens
