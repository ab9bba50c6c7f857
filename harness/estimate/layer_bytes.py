"""Bytes that autograd saves for one decoder layer, from the operations of transformers 5's models;
`e` is the size of a weight in bytes.
"""

from dataclasses import dataclass

from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import FP32, INDEX
from harness.layout.attention_table import ATTENTIONS
from harness.layout.expert import EXPERTS
from harness.layout.releases import is_older
from harness.layout.shape import Tensor

# Tensors of the MLP's width that an activation function and the following product save. gelu_new is
# written in Python: x, the tanh argument, tanh, and two factors; compiled layers save x alone.
_UNFUSED = {"gelu_new": 4, "gelu_fast": 4}


@dataclass(frozen=True)
class Layer:
    """Bytes that one decoder layer saves for a whole micro-batch."""

    attention: int
    mlp: int
    norms: int
    layers: int = 0  # for architectures traced as a whole

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.attention + self.mlp + self.norms + self.layers


def layer_activations(inputs: Inputs, index: int) -> Layer:
    """Return the bytes that autograd saves for layer `index` without checkpointing."""
    if inputs.trace is not None:
        each = inputs.trace.layers[inputs.first_layer + index]
        return Layer(0, 0, 0, int(each * inputs.tokens))
    # Compiled linear layers keep what divided ranks gathered (engine/residuals.py).
    kept = (inputs.tokens - inputs.stream_tokens) * inputs.compiled
    return Layer(
        _attention(inputs, index) * inputs.tokens,
        _mlp(inputs, index) * inputs.tokens + _sent_beside(inputs, index),
        _norms(inputs) * inputs.stream_tokens
        + 2 * inputs.element_bytes * inputs.shape.hidden_size * kept,
    )


def _attention(inputs: Inputs, index: int) -> int:
    shape, e, s = inputs.shape, inputs.element_bytes, inputs.seq_len
    family, q, kv, heads = shape.family, shape.q_size, shape.kv_size, shape.num_heads
    size = 0
    # RMSNorms of queries and keys, per head or over all heads.
    for norm, width in zip(_norms_within(shape.body.layers[index]), (q, kv), strict=False):
        size += rms_norm(inputs, width, inputs.fused) + FP32 * max(1, width // norm.numel)
    if inputs.grid.sequence > 1:
        # models/sequence.py: key heads are repeated if fewer than ranks, and the projection's input
        # is the exchanged tensor, not attention's output.
        kv = max(kv, shape.head_dim * inputs.grid.sequence)
        size += e * q
    masked = is_masked(inputs, index)
    if ATTENTIONS[inputs.attention].keeps_scores:
        # Softmax in fp32, its copy in the model's dtype, keys and values repeated for every head.
        scores = e if e == FP32 or family.half_softmax else FP32 + e
        scores += e if family.soft_caps else 0  # tanh saves its output
        return size + 4 * e * q + scores * heads * s
    if writes_scores(inputs):
        # Queries, keys and values in fp32, the last two copied for every head unless a single
        # sample allows views; the scores.
        copied = q if inputs.micro_batch > 1 else kv
        return size + e * q + FP32 * (q + 2 * copied + heads * s)
    size += 2 * e * (q + kv)
    kind = ATTENTIONS[inputs.attention]
    by_document = inputs.attention == "varlen" or not kind.is_exact
    # Attention in pieces or by document is recomputed.
    if kind.is_exact and not (by_document and inputs.accelerator == "cpu"):
        size += FP32 * heads  # log-sum-exp
    made_for_sdpa = masked and inputs.attention == "sdpa"
    repeated, exchanged = made_for_sdpa and q != kv, inputs.grid.sequence > 1
    rotates = not (family.learned_positions or family.alibi)
    if family.fused_projections and rotates and not (repeated or exchanged):
        size += e * (q + kv)  # v is a view of the fused tensor
    if family.rotary_in_part and not (exchanged or by_document):
        size += e * q  # the projection's input is a copy of the output
    if made_for_sdpa:
        # Keys and values are repeated, and the boolean mask is converted to floats, in every layer.
        size += 2 * e * (q - kv) + e * s
    return size


def writes_scores(inputs: Inputs) -> bool:
    """Return True if SDPA computes all scores: its fused kernels need as many key heads as query
    heads (check_batch_size_and_num_heads_dense in torch's sdp_utils_cpp.h, on CPUs and GPUs).
    """
    one_head = inputs.shape.family.unexpanded_keys and inputs.shape.num_kv_heads == 1
    needs_repeats = is_older((2, 15), "torch")  # 2.15's fused kernels take one key head
    multi_query = one_head and inputs.shape.num_heads > 1
    return multi_query and needs_repeats and inputs.attention == "sdpa"


def is_masked(inputs: Inputs, index: int) -> bool:
    """Return True if SDPA needs an explicit mask; it only has the plain causal one built in."""
    window = inputs.shape.sliding_windows[index] if inputs.trace is None else None
    return inputs.document_mask or (window is not None and inputs.seq_len >= window)


def _mlp(inputs: Inputs, index: int) -> int:
    shape, e = inputs.shape, inputs.element_bytes
    if has_experts(inputs, index):
        k, h, f = shape.experts_per_token, shape.hidden_size, shape.expert_size
        # Each chosen expert's input, gate, activation, up, product and output, and indices; the
        # router's softmax over all experts.
        size = k * (4 * e * f + 2 * e * h + 5 * INDEX) + FP32 * shape.num_experts + FP32
        # engine/expert.py: rows are reordered twice and weighted with 1 on arrival; assumes equally
        # many tokens per expert.
        return size + (k * (INDEX + FP32) if inputs.grid.expert > 1 else 0)
    # Each tile keeps its part of the MLP's input.
    return dense_mlp(inputs) if inputs.mlp_tiles == 1 else 0


def dense_mlp(inputs: Inputs) -> int:
    """Return the bytes per token that an MLP without experts saves, excluding its input."""
    shape, e, f = inputs.shape, inputs.element_bytes, inputs.shape.intermediate_size
    if shape.family.gated_mlp:
        # Gate, activation, up and product; fused kernels recompute the activation.
        return (3 if inputs.fused else 4) * e * f
    name = inputs.activation or shape.family.activation
    unfused = {} if inputs.compiled else _UNFUSED
    return (1 + unfused.get(name, 0 if name == "relu" else 1)) * e * f


def has_experts(inputs: Inputs, index: int) -> bool:
    """Return True if layer `index` is a mixture of experts."""
    return any(tensor.kind == EXPERTS for tensor in inputs.shape.body.layers[index])


def _sent_beside(inputs: Inputs, index: int) -> int:
    """Return the bytes that sharding adds to a layer's experts: a row of zeros, and end indices."""
    shape, e, ranks = inputs.shape, inputs.element_bytes, inputs.grid.expert
    if ranks == 1 or not has_experts(inputs, index):
        return 0
    row = e * (4 * shape.expert_size + shape.hidden_size) + 2 * INDEX + FP32
    return row + FP32 * shape.num_experts // ranks


def _norms(inputs: Inputs) -> int:
    shape, e = inputs.shape, inputs.element_bytes
    layer = shape.body.layers[0]
    weights = sum(t.kind == "norm" and t.name.endswith("weight") for t in layer)
    count = weights - len(_norms_within(layer)) or 2  # OPT's norms may have no weights
    dropped = int(shape.hidden_size * 2 * bool(inputs.dropout))  # masks, one byte per element
    if shape.family.layer_norm:
        one_input = shape.family.norms_side_by_side and inputs.parallel_residual
        shared = e * shape.hidden_size * one_input
        return count * (2 * e * shape.hidden_size + 2 * e) - shared + dropped
    # Attention and MLP save their input, whether from a norm or the residual stream.
    linear_inputs = 2 * e * shape.hidden_size
    if inputs.liger and inputs.compiled:  # an H200's peak has one more tensor in each layer
        linear_inputs += e * shape.hidden_size
    norm = rms_norm(inputs, shape.hidden_size, inputs.fused) + FP32
    return count * norm + linear_inputs + dropped


def rms_norm(inputs: Inputs, width: int, fused: bool) -> int:
    """Return the bytes per token that an RMSNorm saves, without its scale: its input in fp32 and
    the normalised input; if it is fused, just the input.
    """
    e = inputs.element_bytes
    normalised = FP32 if inputs.shape.family.fp32_norms else e
    return (e if fused else FP32 + normalised) * width


def _norms_within(layer: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the weights of norms inside a layer's attention: of queries and of keys."""
    return [t for t in layer if t.kind == "norm" and t.name.count(".") > 1]
