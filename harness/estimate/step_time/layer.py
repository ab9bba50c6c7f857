"""Times of one micro-batch in the parts of a model, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import add

from harness.estimate.inputs import BY_REFERENCE, Inputs
from harness.estimate.layer_bytes import dense_mlp, is_masked, layer_activations, writes_scores
from harness.estimate.step_time.machine import LAUNCH_SECONDS, Machine
from harness.layout.adapters import is_linear
from harness.layout.attention_table import ATTENTIONS
from harness.layout.shape import Tensor, attention_width, is_stacked

TILE = 128
"""Rows and columns of the part of a result that one multiprocessor computes at a time."""


def product_seconds(
    rows: float, columns: int, depth: int, element_bytes: int, machine: Machine
) -> float:
    """Return the seconds of (rows x depth) @ (depth x columns).

    Multiprocessors compute tiles in waves, and the last wave may be partly empty (NVIDIA, "Matrix
    Multiplication Background User's Guide", sections 3 and 4). A small product is limited by
    memory: reading its operands and writing its result. Every product takes at least as long as an
    empty kernel. tests/estimate/test_published_throughput.py compares with published rates.
    """
    tiles = ceil(rows / TILE) * ceil(columns / TILE)
    full = tiles / machine.multiprocessors
    waves = full + machine.partial_wave * (ceil(full) - full)
    flops = 2 * waves * machine.multiprocessors * TILE * TILE * depth
    moved = element_bytes * (rows * columns + rows * depth + columns * depth)
    computed = flops / (machine.peak_flops * machine.products)
    return max(computed, moved / machine.memory_rate) + machine.kernel_seconds


FORWARD_PASSES = 1.9
"""How often the forward pass moves the bytes that it saves: written once, read by the next
operation, plus what is not saved."""
BACKWARD_PASSES = 3.1
"""How often the backward pass moves them: it reads them and a gradient of their size, and writes
another."""
RMS_NORM_BYTES = (26, 52)
"""Bytes moved per element of an unfused RMSNorm, forward and backward, in addition to those of what
it saves: it is cast to fp32, squared, averaged, multiplied, cast back and multiplied, 36 bytes
forward and twice that backward, of which the passes above count 10 and 20. Runs with and without a
fused kernel (arXiv 2311.05610, torchtitan) differ by 8 to 14 %."""
FLOAT8_PRODUCT = 0.52
"""Time of a float8 product relative to one in bf16, whose peak is half as high: torchtitan's
Llama-3.1-8B is 28 % faster with it on 8 H100."""
FLOAT8_CAST_BYTES, FLOAT8_COMPILED_BYTES, FLOAT8_LAUNCH = 33, 3, 4.0
"""Bytes moved per element of a product's operands to round them (torchao, one operation after the
other; compiled, they are read once); a backward pass rounds twice as many. Host time of a layer not
compiled, relative to one in bf16: a guess from its number of kernels."""
ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass relative to the forward pass: five products instead of
two (arXiv 2307.08691, section 3.1.2)."""
LOGIT_BYTES = 26
"""Bytes moved per logit: cast to fp32, log-softmax, its gradient, cast back."""
STEP_SECONDS = 5.0e-6
"""Minimum seconds per token in cuDNN's kernels for recurrent cells; a guess, not measured here."""
FUSED_LAUNCH = 0.4
QUANTIZED_LAUNCH = 1.56
"""Host time of a layer with 4-bit weights, relative to one without: bitsandbytes launches several
kernels for each linear layer (litgpt's tutorials/quantize.md: 2.36 and 3.68 minutes for 1,000 rows
of Alpaca through Llama-2-7B on an A100)."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of a micro-batch in one part of the model."""

    products: float = 0.0
    attention: float = 0.0
    serial: float = 0.0
    """Recurrent cells, whose tokens wait for each other."""
    elements: float = 0.0
    launches: float = 0.0
    """Time beyond the GPU's own work, when the host launches kernels more slowly than they run."""
    idle: float = 0.0
    """Host time left while the GPU computes the layers; not part of any sum."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.products + self.attention + self.serial + self.elements + self.launches

    def times(self, factor: float) -> Seconds:
        """Return the seconds of `factor` such passes."""
        return Seconds(*(seconds * factor for seconds in vars(self).values()))

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Passes:
    """Seconds of the forward pass, the backward pass, and recomputation (of a layer by itself: a
    forward pass of its tiled MLP)."""

    forward: Seconds
    backward: Seconds
    again: Seconds = Seconds()

    def times(self, factor: float) -> Passes:
        """Return the seconds of `factor` such parts."""
        return Passes(*(seconds.times(factor) for seconds in vars(self).values()))

    def __add__(self, other: Passes) -> Passes:
        return Passes(*map(add, vars(self).values(), vars(other).values()))


def layer_passes(inputs: Inputs, index: int, machine: Machine) -> Passes:
    """Return the seconds of this stage's decoder layer `index`, as if it were not checkpointed."""
    tensors = inputs.shape.body.layers[index]
    dense = [t for t in tensors if len(t.shape) == 2 and t.kind != "experts" and not is_serial(t)]
    in_float8 = [t for t in dense if is_linear(t)] if inputs.float8 else []
    products = _experts(inputs, tensors, machine) + _products(inputs, dense, machine)
    products -= (1 - FLOAT8_PRODUCT) * _products(inputs, in_float8, machine)
    each = FLOAT8_COMPILED_BYTES if inputs.compiled else FLOAT8_CAST_BYTES
    cast = each * _cast(inputs, in_float8) / machine.memory_rate
    reached = machine.peak_flops * _attention_share(inputs, index, machine)
    attention = attention_flops(inputs, index) / reached
    serial, summed = _serial(inputs, tensors, machine)
    moved = _moved(inputs, index) / machine.memory_rate
    norms = _written_out(inputs, tensors) * inputs.stream_tokens / machine.memory_rate
    dequantized = _dequantized(inputs, tensors) / machine.memory_rate
    launch = LAUNCH_SECONDS * machine.launch_scale * (FUSED_LAUNCH if inputs.fused else 1.0)
    launch *= 1.0 if inputs.quantization is None else QUANTIZED_LAUNCH
    launch *= FLOAT8_LAUNCH if inputs.float8 and not inputs.compiled else 1.0
    forward = Seconds(
        products,
        attention,
        serial,
        moved * FORWARD_PASSES + norms * RMS_NORM_BYTES[0] + dequantized + cast,
    )
    backward = Seconds(
        _backward_products(inputs) * products + summed,
        ATTENTION_BACKWARD * attention,
        serial,
        moved * BACKWARD_PASSES + norms * RMS_NORM_BYTES[1] + dequantized + 2 * cast,
    )
    tiled = Seconds()
    if inputs.mlp_tiles > 1:
        mlp = [tensor for tensor in dense if tensor.kind == "mlp"]
        moved_by_mlp = dense_mlp(inputs) * inputs.tokens / machine.memory_rate
        tiled = Seconds(_products(inputs, mlp, machine), elements=moved_by_mlp * FORWARD_PASSES)
    return Passes(
        _launched(forward, launch, machine), _launched(backward, 1.5 * launch, machine), tiled
    )


def _products(inputs: Inputs, tensors: Sequence[Tensor], machine: Machine) -> float:
    """Return the seconds of a micro-batch's products with matrices."""
    return sum(
        product_seconds(inputs.tokens, *_sides(tensor), inputs.element_bytes, machine)
        for tensor in tensors
    )


def _cast(inputs: Inputs, tensors: Sequence[Tensor]) -> int:
    """Return the elements of the operands of a forward pass's products with matrices."""
    return sum(inputs.tokens * _sides(tensor)[1] + tensor.numel for tensor in tensors)


def head_passes(inputs: Inputs, machine: Machine) -> Passes:
    """Return the seconds of the output layer and the loss."""
    vocabulary, hidden = inputs.shape.vocab_size, inputs.shape.hidden_size
    product = product_seconds(inputs.tokens, vocabulary, hidden, inputs.element_bytes, machine)
    moved = LOGIT_BYTES * vocabulary * inputs.tokens / machine.memory_rate
    again = Seconds(product) if inputs.chunk else Seconds()
    backward = Seconds(_backward_products(inputs) * product, elements=moved / 2)
    return Passes(Seconds(product, elements=moved / 2), backward, again)


def _written_out(inputs: Inputs, tensors: tuple[Tensor, ...]) -> int:
    """Return the elements per token in a layer's unfused RMSNorms."""
    if inputs.fused or inputs.shape.family.layer_norm:
        return 0
    hidden = inputs.shape.hidden_size
    return sum(hidden for t in tensors if t.kind == "norm" and t.shape == (hidden,))


def _dequantized(inputs: Inputs, tensors: tuple[Tensor, ...]) -> float:
    """Return the bytes read and written to dequantize 4-bit weights before products."""
    if (own := inputs.quantization) is None:
        return 0.0
    weights = [tensor.numel for tensor in tensors if is_linear(tensor)]
    return float(sum(own.weight_bytes(n) + inputs.element_bytes * n for n in weights))


def _backward_products(inputs: Inputs) -> int:
    """Return the backward products per forward one: frozen weights have no gradient."""
    return 2 if inputs.adapters is None else 1


def _launched(seconds: Seconds, launch: float, machine: Machine) -> Seconds:
    if not machine.is_asynchronous:
        return replace(seconds, launches=launch)
    busy = seconds.total
    return replace(seconds, launches=max(0.0, launch - busy), idle=max(0.0, busy - launch))


def is_serial(tensor: Tensor) -> bool:
    """Return True for the matrix of a recurrent cell that multiplies its state, token by token."""
    return tensor.kind == "states" and tensor.name.rpartition(".")[2] == "weight_hh"


def _serial(inputs: Inputs, tensors: tuple[Tensor, ...], machine: Machine) -> tuple[float, float]:
    """Return the seconds of a pass in which each token of a sample waits for the previous one, and
    of the sum over tokens that gives the matrix's gradient.

    cuDNN's kernels step through the tokens without the host. A step takes as long as a product for
    all samples' states, and at least as long as a kernel.
    """
    each = sum_ = 0.0
    for tensor in filter(is_serial, tensors):
        sides = *_sides(tensor), inputs.element_bytes, machine
        least = STEP_SECONDS * machine.launch_scale
        each += max(least, product_seconds(inputs.micro_batch, *sides))
        sum_ += product_seconds(inputs.tokens, *sides) if inputs.adapters is None else 0.0
    return inputs.seq_len * each, sum_


def _moved(inputs: Inputs, index: int) -> float:
    """Return the bytes that elementwise operations save for a layer, including those of its MLP's
    tiles. For a state traced through reference code, return what its kernels read and write: both
    sides of each product and convolution.
    """
    whole = replace(inputs, mlp_tiles=1) if inputs.mlp_tiles > 1 else inputs
    saved = layer_activations(whole, index).total
    tensors = inputs.shape.body.layers[index]
    if not (inputs.layers_by == BY_REFERENCE and any(t.kind == "states" for t in tensors)):
        return saved
    sides = sum(sum(t.shape) for t in tensors if len(t.shape) == 2)
    sides += sum(2 * t.shape[0] for t in tensors if len(t.shape) == 3 and not is_stacked(t))
    chosen = inputs.shape.experts_per_token
    sides += sum(chosen * sum(t.shape[1:]) for t in tensors if is_stacked(t))
    return min(saved, inputs.element_bytes * sides * inputs.tokens)


def _sides(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], tensor.shape[1]


def _experts(inputs: Inputs, tensors: tuple[Tensor, ...], machine: Machine) -> float:
    """Return the seconds of a layer's experts on this rank, each with equally many tokens."""
    elements = sum(tensor.numel for tensor in tensors if tensor.kind == "experts")
    shape, ranks = inputs.shape, inputs.grid.expert
    if not elements:
        return sum(
            t.shape[0]
            * product_seconds(
                inputs.tokens * shape.experts_per_token / t.shape[0],
                *(t.shape[1], t.shape[2], inputs.element_bytes, machine),
            )
            for t in tensors
            if is_stacked(t)
        )
    here = max(1, shape.num_experts // ranks)
    rows = inputs.tokens * shape.experts_per_token / here
    each = product_seconds(
        rows, shape.expert_size, shape.hidden_size, inputs.element_bytes, machine
    )
    matrices = elements / (here * shape.expert_size * shape.hidden_size)
    return here * matrices * each


def _attention_share(inputs: Inputs, index: int, machine: Machine) -> float:
    """Return the share of the peak that a layer's attention kernels reach."""
    if inputs.attention == "flash_attention_3":
        return machine.attention * machine.flash_attention_3
    plain = not (is_masked(inputs, index) or writes_scores(inputs))
    if inputs.attention == "sdpa" and plain and inputs.products != "fp32":
        return machine.attention * machine.sdpa  # cuDNN's kernels do not compute in fp32
    return machine.attention


def attention_flops(inputs: Inputs, index: int) -> float:
    """Return the operations of a layer's attention in the forward pass of a micro-batch.

    A token sees half of the sequence on average (or of its document, if kernels get document
    bounds), limited by a sliding window. With sequence parallelism a rank computes its heads for
    all tokens.
    """
    width = attention_width(inputs.shape, inputs.shape.body.layers[index])
    window = inputs.shape.sliding_windows[index] if inputs.shape.sliding_windows else None
    sizes = dict(inputs.attention_sizes)
    kind, half = ATTENTIONS[inputs.attention], inputs.seq_len / 2
    if kind.takes_bounds and inputs.seen_tokens is not None:
        half = min(half, inputs.seen_tokens)
    context = kind.keys(sizes, half)
    if window is not None:
        context = min(context, window)
    if inputs.attention == "eager" or (inputs.attention == "sdpa" and is_masked(inputs, index)):
        context = inputs.seq_len  # masked positions are still computed
    return 4.0 * inputs.tokens * context * width
