"""Activations: what autograd saves for the backward pass, and the peak around the loss.

Tests compare the sums with what autograd saves for the real models; for a family that was not
compared, `activation_evidence` returns "guessed".
"""

from collections.abc import Iterator
from dataclasses import replace

from harness.estimate.inputs import BY_REFERENCE, ELEMENT_BYTES, WITH_KERNELS, Inputs
from harness.estimate.layer_bytes import (
    Layer,
    dense_mlp,
    has_experts,
    is_masked,
    layer_activations,
    rms_norm,
    writes_scores,
)
from harness.estimate.memory_item import (
    ALWAYS,
    BACKWARD,
    BEFORE_BACKWARD,
    FP32,
    INDEX,
    STEPPED,
    Evidence,
    MemoryItem,
    Once,
    Place,
    call,
)
from harness.layout.attention_table import ATTENTIONS
from harness.layout.recompute import REVERSIBLE, is_checkpointed


def carried_states(inputs: Inputs) -> Iterator[MemoryItem]:
    """Yield the carried states of all of a rank's rows in fp32 and, for the current window, the
    states before and after it (harness/engine/forward.py).
    """
    if not inputs.carried_numbers:
        return
    window = FP32 * inputs.carried_numbers * inputs.micro_batch
    yield MemoryItem("carried states", window * inputs.grad_accum, ALWAYS - {"build"}, "measured")
    yield MemoryItem(
        "carried states of a window", 2 * window, frozenset({"forward", "loss"}), "read"
    )


_FORWARD, _FIRST, _LAST = map(frozenset, (["forward"], ["backward_first"], ["backward_last"]))
_IN_LAYERS = _FORWARD | BACKWARD
_FORWARD_TO_BACKWARD = BEFORE_BACKWARD | BACKWARD


def activation_evidence(inputs: Inputs) -> Evidence:
    """Return the evidence for the family's activations."""
    compared = inputs.shape.family.compared
    traced = "activations" in compared and not inputs.dropout
    traced |= inputs.trace is not None and inputs.trace.way != BY_REFERENCE
    traced &= ATTENTIONS[inputs.attention].is_traced and not (inputs.liger or inputs.compiled)
    if max(inputs.grid.tensor, inputs.grid.sequence, inputs.grid.expert) > 1:
        traced &= "divided activations" in compared
    if traced and inputs.layers_by == WITH_KERNELS:
        return "read"
    return "traced" if traced else "guessed"


def activations(inputs: Inputs, once: Once = call) -> list[MemoryItem]:
    """Return saved activations and the temporaries of the backward pass.

    They are for one micro-batch, or for all that a pipeline stage has in flight.
    """
    if inputs.autocast:
        return _under_autocast(inputs)
    evidence, batches = activation_evidence(inputs), inputs.in_flight
    kinds = inputs.layers_alike
    layers = {each[0]: once(layer_activations, inputs, each[0]) for each in kinds}
    parts: list[MemoryItem] = []
    kept = [(_kept(inputs, each[0], layers[each[0]]), len(each)) for each in kinds]
    for name, place in {key: None for sizes, _ in kept for key in sizes}:
        total = sum(sizes.get((name, place), 0) * count for sizes, count in kept)
        if place == "host":  # buffers are kept between steps (models/recompute.py)
            parts.append(MemoryItem(name, batches * total, STEPPED, evidence, place))
            continue
        parts.append(MemoryItem(name, batches * total, BEFORE_BACKWARD, evidence, place))
        first = kept[0][0].get((name, place), 0)
        left = (batches - 1) * total + first  # still needed at the end of a backward pass
        parts.append(MemoryItem(name, left, _LAST, evidence, place))
    last = next(each[0] for each in kinds if each[-1] == inputs.shape.num_layers - 1)
    for phases, index in ((_FIRST, last), (_LAST, 0)):
        again = _recomputed(inputs, index, layers[index])
        parts.append(MemoryItem("recomputed layer", again, phases, evidence))
    if inputs.checkpointing == REVERSIBLE:
        stream = FP32 * inputs.shape.hidden_size * inputs.tokens
        parts.append(MemoryItem("activations: streams", 2 * stream, _FORWARD_TO_BACKWARD, evidence))
        parts.append(MemoryItem("gradients of streams", 2 * stream, BACKWARD, "read"))
    if inputs.activation_offload:  # the layer in transit
        on_its_way = sum(kept[0][0].values())
        parts.append(MemoryItem("layer moved to and from the host", on_its_way, _IN_LAYERS, "read"))
    if inputs.mlp_tiles > 1:
        tile = dense_mlp(inputs) * -(-inputs.tokens // inputs.mlp_tiles)
        parts.append(MemoryItem("MLP tile", tile, _IN_LAYERS, evidence))
    # The mask is an argument of every checkpointed layer.
    lives = _FORWARD if inputs.checkpointing == "none" else _FORWARD_TO_BACKWARD
    parts.append(MemoryItem("attention mask", _mask(inputs), lives, "read"))
    shared = batches * (INDEX * inputs.tokens + _positions(inputs) + _embedding_norm(inputs))
    parts.append(MemoryItem("activations: shared", shared, _FORWARD_TO_BACKWARD, evidence))
    parts.append(MemoryItem("backward temporaries", _temporaries(inputs), BACKWARD, "guessed"))
    if inputs.has_head:
        parts.append(MemoryItem("activations: head", _head(inputs), _FORWARD | {"loss"}, evidence))
        parts += logits(inputs)
    return [part for part in parts if part.bytes]


_STAYS_WIDE = 0.3
"""Share of the bytes between fp32 and bf16 that torch.autocast keeps of saved activations: 0.29 for
llama, 0.31 for qwen2, 0.11 for gpt2, of 512 wide models in torch 2.13."""


def _under_autocast(inputs: Inputs) -> list[MemoryItem]:
    """Return activations between those of bf16 and fp32, and the bf16 copies of weights, which
    autograd keeps for the backward pass.
    """
    wide = replace(inputs, autocast=False)
    half = {(p.component, p.phases): p.bytes for p in activations(replace(wide, precision="bf16"))}
    items = []
    for part in activations(wide):
        least = half.get((part.component, part.phases), part.bytes)
        size = least + round(_STAYS_WIDE * (part.bytes - least))
        items.append(replace(part, bytes=size, evidence="guessed"))
    way, first = inputs.checkpointing, inputs.first_layer
    kept = sum(
        len(each) for each in inputs.layers_alike if not is_checkpointed(way, first + each[0])
    )
    _, *layers, head = (sum(t.numel for t in unit) for unit in inputs.shape.body.units)
    copied = ELEMENT_BYTES["bf16"] * (max(1, kept) * max(layers) + head)
    return [*items, MemoryItem("autocast: weights", copied, _FORWARD_TO_BACKWARD, "guessed")]


def attention_copies(inputs: Inputs) -> MemoryItem:
    """Return the queries, keys, values and results that attention kernels may keep in another
    layout, in addition to those counted.

    ml-engineering's activation-memory-per-layer.py measured up to 2.5 x 2h bytes per token and
    layer more on GPUs than layer_bytes.py computes.
    """
    shape, way, first = inputs.shape, inputs.checkpointing, inputs.first_layer
    kept = inputs.in_flight * sum(
        len(each) for each in inputs.layers_alike if not is_checkpointed(way, first + each[0])
    )
    each = 2 * inputs.element_bytes * (shape.q_size + shape.kv_size) * inputs.tokens
    size = max(1, kept) * each
    return MemoryItem("activations: copies of attention", size, BEFORE_BACKWARD, "published")


def saved_for_backward(inputs: Inputs) -> int:
    """Return the bytes that autograd holds between a forward pass and its backward pass.

    If every layer is checkpointed, rotary tensors are arguments of each layer: alive but not saved.
    """
    parts = [part for part in activations(inputs) if part.component.startswith("activations")]
    size = sum(part.bytes for part in parts if "loss" in part.phases) + log_softmax(inputs)
    layers = range(inputs.first_layer, inputs.first_layer + inputs.shape.num_layers)
    if all(is_checkpointed(inputs.checkpointing, layer) for layer in layers):
        size -= 0 if inputs.shape.family.learned_positions else _positions(inputs)
    return size


def _kept(inputs: Inputs, index: int, layer: Layer) -> dict[tuple[str, Place], int]:
    """Return the bytes that a layer keeps of a micro-batch, by component and place."""
    if not is_checkpointed(inputs.checkpointing, inputs.first_layer + index):
        return {(f"activations: {kind}", "device"): size for kind, size in vars(layer).items()}
    if inputs.checkpointing == REVERSIBLE:  # only the last layer's streams are kept
        return {}
    place: Place = "host" if inputs.activation_offload else "device"
    boundary = inputs.element_bytes * inputs.shape.hidden_size * inputs.stream_tokens
    sizes: dict[tuple[str, Place], int] = {("activations: layer inputs", place): boundary}
    if inputs.checkpointing == "selective":
        sizes["activations: kept results", place] = sum(_results(inputs, index))
    return sizes


def offloaded_bytes(inputs: Inputs) -> int:
    """Return the bytes of a micro-batch that this stage's layers offload to the host."""
    if not inputs.activation_offload:
        return 0
    none = Layer(0, 0, 0)  # offloaded layers keep nothing of it
    kept = [(_kept(inputs, each[0], none), len(each)) for each in inputs.layers_alike]
    return sum(size * count for sizes, count in kept for size in sizes.values())


def _results(inputs: Inputs, index: int) -> tuple[int, int]:
    """Return the bytes of results that `selective` keeps of a layer (models/recompute.py): those
    that its backward pass needs directly, and those from which it recomputes others.
    """
    shape, e = inputs.shape, inputs.element_bytes
    if inputs.trace is not None:  # which of them its backward pass needs is unknown
        kept = inputs.trace.selective[inputs.first_layer + index] - e * shape.hidden_size
        return 0, int(kept * inputs.tokens)
    # Rotated queries and keys, and the inputs of norms, are recomputed from them.
    from_them = e * (shape.q_size + 2 * shape.kv_size + shape.hidden_size)
    as_they_are = 0
    kind = ATTENTIONS[inputs.attention]
    if kind.is_exact and not kind.keeps_scores and not writes_scores(inputs):
        as_they_are += e * shape.q_size + FP32 * shape.num_heads
    if has_experts(inputs, index):
        chosen = shape.experts_per_token
        as_they_are += chosen * e * (2 * shape.expert_size + shape.hidden_size)
        from_them += e * shape.num_experts
    elif inputs.mlp_tiles == 1:
        as_they_are += e * shape.intermediate_size * (2 if shape.family.gated_mlp else 1)
        from_them += e * shape.hidden_size
    return as_they_are * inputs.tokens, from_them * inputs.tokens


def _recomputed(inputs: Inputs, index: int, layer: Layer) -> int:
    """Return the bytes that a layer's backward pass recomputes, in addition to what was kept."""
    if not is_checkpointed(inputs.checkpointing, inputs.first_layer + index):
        return 0
    if inputs.checkpointing == "selective":
        return max(0, layer.total - _results(inputs, index)[0])
    if inputs.checkpointing == REVERSIBLE:  # half a layer at a time
        return max(layer.attention, layer.mlp) + layer.norms // 2
    return layer.total


def _mask(inputs: Inputs) -> int:
    """Return the bytes of the masks that layers share, one for each window size."""
    eager, windows = inputs.attention == "eager", inputs.shape.sliding_windows
    always = eager or ATTENTIONS[inputs.attention].is_own
    if not always and inputs.attention != "sdpa":
        return 0
    layers = [each[0] for each in inputs.layers_alike]
    kinds = {windows[index] for index in layers if always or is_masked(inputs, index)}
    element = inputs.element_bytes if eager else 1
    return len(kinds) * element * inputs.micro_batch * inputs.seq_len**2


def _positions(inputs: Inputs) -> int:
    """Return the bytes of shared rotary cosines and sines, or of position indices."""
    family = inputs.shape.family
    if family.alibi:
        return 0
    each = inputs.document_mask or family.positions_per_sample
    samples = inputs.micro_batch if each else 1
    rows = samples * inputs.seq_len // inputs.grid.sequence
    if family.learned_positions:
        return INDEX * rows
    element = FP32 if family.fp32_rotary else inputs.element_bytes
    return 2 * element * inputs.shape.head_dim * rows


def _embedding_norm(inputs: Inputs) -> int:
    """Return the bytes of the input of a norm between embedding and layers."""
    count = sum(t.kind == "norm" and t.name.endswith("weight") for t in inputs.shape.body.before)
    return count * inputs.element_bytes * (inputs.shape.hidden_size + 2) * inputs.tokens


def _head(inputs: Inputs) -> int:
    """Return the bytes of the final norm, the head's input, and the soft cap on logits."""
    e, h = inputs.element_bytes, inputs.shape.hidden_size
    if inputs.trace is not None:
        counted = (FP32 * inputs.shape.vocab_size + 2 * INDEX) * inputs.tokens + _positions(inputs)
        return max(0, int(inputs.trace.outside * inputs.tokens) - counted)
    family = inputs.shape.family
    if family.layer_norm:
        return (2 * e * h + 2 * e) * inputs.tokens
    capped = e * inputs.shape.vocab_size if family.soft_caps and not inputs.chunk else 0
    return (rms_norm(inputs, h, inputs.liger) + e * h + FP32 + capped) * inputs.tokens


def _temporaries(inputs: Inputs) -> int:
    """Return the bytes of gradients inside one layer at their peak, which is in the MLP: the
    product's gradient or, after it is freed, those of gate and up; and that of the residual stream.
    Liger overwrites gate and up with their gradients.
    """
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    width = max(shape.intermediate_size, shape.expert_size * shape.experts_per_token)
    more = 1 if inputs.liger or not shape.family.gated_mlp else 2
    in_mlp = more * e * width * -(-tokens // inputs.mlp_tiles)
    gathered = tokens - inputs.stream_tokens  # again for the weights' gradients, and its gradient
    gathered *= 1 if inputs.micro_batch == 1 else 2  # parts of several rows are copied
    return in_mlp + e * shape.hidden_size * (tokens + gathered)


def log_softmax(inputs: Inputs) -> int:
    """Return the bytes that the loss saves for its backward pass: log-probabilities (in chunks, the
    log-sum-exp of each token instead) and labels; one number per token if fused.
    """
    if inputs.fuses_loss:
        return FP32 * inputs.tokens
    if inputs.chunk:
        return (FP32 + INDEX) * inputs.tokens
    each = INDEX + 2 * inputs.divides_vocabulary  # masks: local ids, and targets
    return (FP32 * inputs.shape.vocab_size + each) * inputs.tokens


def logits(inputs: Inputs) -> list[MemoryItem]:
    """Return the memory of the loss by phase. With a vocabulary of V and 16-bit logits: 2V + 4V +
    4V bytes per token forward, 4V + 4V + 4V backward.

    models/loss.py frees the logits before the backward pass; keeping the model's output would add
    2V.
    """
    vocabulary = inputs.shape.vocab_size * inputs.tokens
    e = inputs.element_bytes
    half = e != FP32
    saved = log_softmax(inputs)
    if inputs.fuses_loss:
        return _fused_logits(inputs)
    if inputs.chunk:
        return _logits_in_chunks(inputs, saved)
    if inputs.divides_vocabulary:
        # models/token_losses.py: logits, in fp32, minus their maximum, and the exponentials.
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


def _fused_logits(inputs: Inputs) -> list[MemoryItem]:
    """Return the memory of liger_kernel/ops/fused_linear_cross_entropy.py. Its forward pass already
    computes the gradients of hidden states and head. It takes as many tokens at a time, a power of
    two, as have logits about as large as all hidden states, and overwrites these logits with their
    gradient. The head's gradient is accumulated in fp32 (models/loss.py) and cast at the end.
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
