"""Activations: what autograd keeps for the backward pass, and the peak around the loss.

Bytes per token, from what each operation of transformers 5's models saves.  `e` is the size of a
weight.  The tests hold the sums equal to what autograd saves of the real models; where a family is
only guessed at, `activation_evidence` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.estimate.inputs import (
    BACKWARD,
    FP32,
    Evidence,
    Held,
    Inputs,
)
from harness.layout.attentions import ATTENTIONS
from harness.layout.division import divides_vocabulary
from harness.layout.tensors import Tensor

_INDEX = 8  # bytes of an int64

# Tensors as wide as the MLP that an activation function and the product after it keep.  gelu_new is
# written out in Python: x, its cube's argument, tanh, and two factors.
_UNFUSED = {"gelu_new": 4, "gelu_fast": 4}


def activation_evidence(inputs: Inputs) -> Evidence:
    """Return the evidence for the family's activations."""
    compared = inputs.shape.family.compared
    traced = "activations" in compared and not inputs.dropout
    traced |= inputs.traced_layer_bytes is not None
    traced &= ATTENTIONS[inputs.attention].is_traced and not inputs.fused
    if inputs.grid.tensor > 1 or inputs.grid.sequence > 1:
        traced &= "divided activations" in compared
    return "traced" if traced else "guessed"


@dataclass(frozen=True)
class Layer:
    """Bytes that one decoder layer keeps for a whole micro-batch."""

    attention: int
    mlp: int
    norms: int
    layers: int = 0  # of architectures that are traced as a whole

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.attention + self.mlp + self.norms + self.layers


def layer_activations(inputs: Inputs, index: int) -> Layer:
    """Return the bytes that autograd keeps of layer `index` without checkpointing."""
    if inputs.traced_layer_bytes is not None:
        return Layer(0, 0, 0, int(inputs.traced_layer_bytes * inputs.tokens))
    per_token = Layer(_attention(inputs, index), _mlp(inputs, index), _norms(inputs))
    return Layer(*(size * inputs.tokens for size in vars(per_token).values()))


def activations(inputs: Inputs) -> list[Held]:
    """Saved activations and the temporaries of the backward pass.

    Those of one micro-batch, or of all that a pipeline stage has in flight.
    """
    evidence, batches = activation_evidence(inputs), inputs.in_flight
    layers = [layer_activations(inputs, index) for index in range(inputs.shape.num_layers)]
    before_loss = frozenset({"forward", "loss"})
    everything = before_loss | {"backward_first"}
    parts: list[Held] = []
    last, first = layers[-1], layers[0]

    def saved(name: str, total: int, of_first: int) -> None:
        """`total` of a micro-batch, of which the end of its backward pass needs `of_first`."""
        parts.append(Held(name, batches * total, everything, evidence))
        left = (batches - 1) * total + of_first
        parts.append(Held(name, left, frozenset({"backward_last"}), evidence))

    if inputs.checkpointing == "full":
        boundary = inputs.element_bytes * inputs.shape.hidden_size * inputs.tokens
        saved("activations: layer inputs", len(layers) * boundary, boundary)
        for phase, layer in (("backward_first", last), ("backward_last", first)):
            parts.append(Held("recomputed layer", layer.total, frozenset({phase}), evidence))
    else:
        for kind in ("attention", "mlp", "norms", "layers"):
            total = sum(getattr(layer, kind) for layer in layers)
            saved(f"activations: {kind}", total, getattr(first, kind))
    full = inputs.checkpointing == "full"  # then the mask is an argument of every layer
    lives = everything | BACKWARD if full else frozenset({"forward"})
    parts.append(Held("attention mask", _mask(inputs), lives, "read"))
    shared = batches * (_INDEX * inputs.tokens + _positions(inputs) + _embedding_norm(inputs))
    parts.append(Held("activations: shared", shared, everything | BACKWARD, evidence))
    parts.append(Held("backward temporaries", _temporaries(inputs), BACKWARD, "guessed"))
    if inputs.has_head:
        parts.append(Held("activations: head", _head(inputs), before_loss, evidence))
        parts += _logits(inputs)
    return [part for part in parts if part.bytes]


def saved_for_backward(inputs: Inputs) -> int:
    """Return the bytes that autograd holds between a forward pass and its backward pass.

    Under checkpointing rotary tensors and mask are arguments of each layer, alive but not saved.
    """
    parts = [part for part in activations(inputs) if part.component.startswith("activations")]
    size = sum(part.bytes for part in parts if "loss" in part.phases) + log_softmax(inputs)
    if inputs.checkpointing == "full":
        if not inputs.shape.family.learned_positions:
            size -= _positions(inputs)
        if inputs.shape.family.mask_by_position:  # then autograd saves it
            size += _mask(inputs)
    return size


def log_softmax(inputs: Inputs) -> int:
    """The probabilities' logarithms in fp32, the labels, and the weight they sum to."""
    return (FP32 * inputs.shape.vocab_size + _INDEX) * inputs.tokens


def _attention(inputs: Inputs, index: int) -> int:
    shape, e, s = inputs.shape, inputs.element_bytes, inputs.seq_len
    family, q, kv, heads = shape.family, shape.q_size, shape.kv_size, shape.num_heads
    size = 0
    # RMSNorms of queries and keys, over each head or over all heads at once.
    for norm, width in zip(_norms_within(shape.body.layers[index]), (q, kv), strict=False):
        size += (FP32 + _scaled(inputs)) * width + FP32 * max(1, width // norm.numel)
    if inputs.grid.sequence > 1:
        # Ulysses: fewer key heads than ranks are repeated, and the projection's input is not what
        # attention gave but what was exchanged.
        kv = max(kv, shape.head_dim * inputs.grid.sequence)
        size += e * q
    masked = _masked(inputs, index)
    if inputs.attention == "eager":
        # Softmax in fp32, its copy in the model's type, keys and values repeated for every head.
        scores = e if e == FP32 or family.half_softmax else FP32 + e
        scores += e if family.soft_caps else 0  # tanh keeps what it gives
        return size + 4 * e * q + scores * heads * s
    size += 2 * e * (q + kv) + FP32 * heads
    repeated, exchanged = masked and q != kv, inputs.grid.sequence > 1
    rotates = not (family.learned_positions or family.alibi)
    if family.fused_projections and rotates and not (repeated or exchanged):
        size += e * (q + kv)  # v is a part of one tensor of all three
    if family.rotary_in_part and not exchanged:
        size += e * q  # the projection's input is a copy of what came out
    if masked and inputs.attention == "sdpa":
        # Keys and values are repeated, and the boolean mask becomes numbers, in every layer.
        size += 2 * e * (q - kv) + e * s
    return size


def _masked(inputs: Inputs, index: int) -> bool:
    """Return whether a mask is made for SDPA: it knows only the plain causal one by itself.

    Ulysses makes none at all (docs/deepspeed_findings.md, 15).
    """
    if inputs.grid.sequence > 1:
        return False
    window = inputs.shape.sliding_windows[index]
    return inputs.document_mask or (window is not None and inputs.seq_len >= window)


def _mask(inputs: Inputs) -> int:
    """The masks that layers share, one for each window: numbers for eager attention, booleans for
    SDPA.
    """
    eager, windows = inputs.attention == "eager", inputs.shape.sliding_windows
    if not eager and inputs.attention != "sdpa":
        return 0
    kinds = {window for index, window in enumerate(windows) if eager or _masked(inputs, index)}
    element = inputs.element_bytes if eager else 1
    return len(kinds) * element * inputs.tokens * inputs.seq_len


def _mlp(inputs: Inputs, index: int) -> int:
    shape, e = inputs.shape, inputs.element_bytes
    sparse = any(tensor.kind == "experts" for tensor in shape.body.layers[index])
    if sparse:
        k, h, f = shape.experts_per_token, shape.hidden_size, shape.expert_size
        # Each chosen expert's input, gate, activation, up, product and output, and indices; the
        # router's softmax over all experts.
        return k * (4 * e * f + 2 * e * h + 5 * _INDEX) + FP32 * shape.num_experts + FP32
    f = shape.intermediate_size
    if shape.family.gated_mlp:
        return 4 * e * f  # gate, activation, up, product
    name = inputs.activation or shape.family.activation
    return (1 + _UNFUSED.get(name, 0 if name == "relu" else 1)) * e * f


def _norms(inputs: Inputs) -> int:
    shape, e = inputs.shape, inputs.element_bytes
    layer = shape.body.layers[0]
    weights = sum(t.kind == "norm" and t.name.endswith("weight") for t in layer)
    count = weights - len(_norms_within(layer)) or 2  # OPT's may have no weights
    dropped = int(shape.hidden_size * 2 * bool(inputs.dropout))  # masks, a byte an element
    if shape.family.layer_norm:
        one_input = shape.family.norms_side_by_side and inputs.parallel_residual
        shared = e * shape.hidden_size * one_input
        return count * (2 * e * shape.hidden_size + 2 * e) - shared + dropped
    # Attention and MLP keep their input, whether a norm gave it or the stream.
    linear_inputs = 2 * e * shape.hidden_size
    return count * ((FP32 + _scaled(inputs)) * shape.hidden_size + FP32) + linear_inputs + dropped


def _scaled(inputs: Inputs) -> int:
    """Bytes of an element that an RMSNorm multiplies its weight by."""
    return FP32 if inputs.shape.family.fp32_norms else inputs.element_bytes


def _norms_within(layer: tuple[Tensor, ...]) -> list[Tensor]:
    """The weights of norms inside a layer's attention: of queries and of keys."""
    return [t for t in layer if t.kind == "norm" and t.name.count(".") > 1]


def _positions(inputs: Inputs) -> int:
    """Rotary cosines and sines, which all layers share, or the indices of learned positions."""
    family = inputs.shape.family
    if family.alibi:
        return 0
    each = inputs.document_mask or family.positions_per_sample
    samples = inputs.micro_batch if each else 1
    rows = samples * inputs.seq_len // inputs.grid.sequence
    if family.learned_positions:
        return _INDEX * rows
    element = FP32 if family.fp32_rotary else inputs.element_bytes
    return 2 * element * inputs.shape.head_dim * rows


def _embedding_norm(inputs: Inputs) -> int:
    """The input of a norm between embedding and layers."""
    count = sum(t.kind == "norm" and t.name.endswith("weight") for t in inputs.shape.body.before)
    return count * inputs.element_bytes * (inputs.shape.hidden_size + 2) * inputs.tokens


def _head(inputs: Inputs) -> int:
    """The final norm, the input of the output head, and what caps the logits."""
    e, h = inputs.element_bytes, inputs.shape.hidden_size
    family = inputs.shape.family
    if family.layer_norm:
        return (2 * e * h + 2 * e) * inputs.tokens
    capped = e * inputs.shape.vocab_size if family.soft_caps else 0
    return ((FP32 + _scaled(inputs) + e) * h + FP32 + capped) * inputs.tokens


def _temporaries(inputs: Inputs) -> int:
    """Gradients inside one layer: of gate, up and product, and of the stream in both types."""
    shape, e = inputs.shape, inputs.element_bytes
    width = max(shape.intermediate_size, shape.expert_size * shape.experts_per_token)
    return (3 * e * width + (e + FP32) * shape.hidden_size) * inputs.tokens


def _logits(inputs: Inputs) -> list[Held]:
    """The loss in phases: forward 2V + 4V + 4V bytes a token (16-bit), backward 4V + 4V + 4V.

    models/loss.py drops the logits before the backward pass; a caller that keeps the model's output
    would add its 2V.
    """
    vocabulary = inputs.shape.vocab_size * inputs.tokens
    e = inputs.element_bytes
    half = e != FP32
    saved = log_softmax(inputs)
    if inputs.grid.tensor > 1 and divides_vocabulary(inputs.shape):
        # sequence/cross_entropy.py: logits, in fp32, less their largest, and its exponential.
        whole = (e + 3 * FP32) * vocabulary
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
