"""DeepSpeed's communication buffers, and the weights that ZeRO 3 holds gathered."""

from collections.abc import Iterator

from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import ALWAYS, BACKWARD, STEPPED, MemoryItem
from harness.estimate.partition import piece
from harness.estimate.states import optimizer_class
from harness.layout.recompute import matrix_elements

# Elements that stage 0 reduces at a time (engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
_ALLREDUCE = 500_000_000
# DeepSpeed sums norms in fp64 if the device supports it (zero/utils.py, get_norm_dtype), from a
# copy of one gradient at a time, where engine/deepspeed_0_19/between_steps.py leaves its code.
_NORM = 8  # bytes


def communication(inputs: Inputs) -> Iterator[MemoryItem]:
    """Return the buffers in which gradients are reduced."""
    kind = optimizer_class(inputs)
    if kind == "DeepSpeedZeroOptimizer":
        return _bucket12(inputs)
    return _bucket3(inputs) if inputs.zero.stage == 3 else _allreduce(inputs, kind)


def _bucket12(inputs: Inputs) -> Iterator[MemoryItem]:
    zero = inputs.zero
    wide = zero.stage == 1 and inputs.sum_bytes != inputs.element_bytes
    element = inputs.sum_bytes if wide else inputs.element_bytes
    if zero.contiguous_gradients or zero.offload_optimizer != "device":
        # Allocated in every backward pass (for stage 1 in the first), and twice if reduction
        # overlaps it (setup_buckets); under a pipeline it never overlaps, and the reduction
        # allocates another.
        pipelined = inputs.stage is not None
        size = element * zero.reduce_bucket * (2 if zero.overlap_comm and not pipelined else 1)
        yield MemoryItem("gradient buckets", size, BACKWARD | {"reduce"}, "measured")
        if zero.stage == 1 and inputs.accumulates:
            yield MemoryItem("gradient buckets", size, frozenset({"forward", "loss"}), "read")
        if pipelined:
            yield MemoryItem("gradient buckets", size, frozenset({"reduce"}), "read")
    # Stage 2 with fp32 sums reduces in fp32 what it collected in 16 bits. A parameter larger than
    # the bucket is reduced by itself; with offload, from a clone.
    largest = max(tensor.numel for tensor in inputs.trained_tensors)
    small = min(zero.reduce_bucket, inputs.trained)
    offload = zero.offload_optimizer != "device"
    if zero.stage == 2 and inputs.sum_bytes != inputs.element_bytes:
        copy = inputs.sum_bytes * max(small, largest)
    elif inputs.comm_bytes > inputs.element_bytes:  # cast up, even a gradient reduced by itself
        copy = inputs.comm_bytes * max(small, largest)
    else:
        copy = inputs.comm_bytes * small
    if offload and largest > small:
        copy += inputs.element_bytes * largest
    if inputs.shards > 1:
        yield MemoryItem("communication copy", copy, BACKWARD, "read")
    if zero.stage == 2:
        made = inputs.element_bytes * largest
        yield MemoryItem("gradient being made", made, BACKWARD, "read")
    part = min(largest, inputs.sharded_parameters)
    if not offload:
        yield from _copied_for_norm(inputs, part)
        return
    # With offload, norms are computed as gradients arrive; the embedding's comes after activations
    # are freed.
    yield MemoryItem("norm in fp64", _NORM * part, frozenset({"backward_last"}), "read")
    early = max((t.numel for t in inputs.trained_tensors if t.kind != "embedding"), default=0)
    part = min(early, inputs.sharded_parameters)
    yield MemoryItem("norm in fp64", _NORM * part, frozenset({"backward_first"}), "read")


def _bucket3(inputs: Inputs) -> Iterator[MemoryItem]:
    bucket = inputs.zero.reduce_bucket
    if inputs.zero.contiguous_gradients:
        yield MemoryItem("gradient buckets", inputs.comm_bytes * bucket, ALWAYS, "measured")
    largest = max(tensor.numel for tensor in inputs.trained_tensors)
    # reduce_scatter_coalesced copies the shards of a bucket. A gradient larger than the bucket is
    # reduced by itself, in place unless it does not divide evenly.
    alone = [
        tensor.numel
        for group in inputs.groups()
        for tensor in group
        if tensor.numel > bucket and tensor.numel % inputs.shards_of(group)
    ]
    copied = max([min(bucket, inputs.trained), *alone])
    if inputs.comm_bytes != inputs.element_bytes:  # cast to the communication type before that
        copied += max(min(bucket, inputs.trained), largest)
    yield MemoryItem("communication copy", inputs.comm_bytes * copied, BACKWARD, "read")
    # If a layer is gathered as a whole, its gradients are reduced after its input's gradient.
    made = max(largest, inputs.layer_elements) if inputs.gathers_layers else largest
    yield MemoryItem("gradient being made", inputs.element_bytes * made, BACKWARD, "read")
    part = max(
        piece(max(tensor.numel for tensor in group), inputs.shards_of(group))
        for group in inputs.groups()
    )
    yield from _copied_for_norm(inputs, part)


def _copied_for_norm(inputs: Inputs, part: int) -> Iterator[MemoryItem]:
    grid, offload = inputs.grid, inputs.zero.offload_optimizer
    if offload != "device" or grid.tensor > 1 or grid.pipeline > 1:
        yield MemoryItem("norm in fp64", _NORM * part, frozenset({"norm"}), "read")


def _allreduce(inputs: Inputs, kind: str) -> Iterator[MemoryItem]:
    """Yield reduction buffers; BF16_Optimizer casts its flat groups one by one (finding 36)."""
    if kind != "BF16_Optimizer":
        elements = min(inputs.trained, _ALLREDUCE)
    elif inputs.shards > 1 and inputs.sum_bytes != inputs.comm_bytes:
        elements = max(flat.padded for flat in inputs.flats)
    else:
        return
    size = inputs.comm_bytes * elements
    yield MemoryItem("communication copy", size, frozenset({"reduce"}), "measured")


def dequantized_weight(inputs: Inputs) -> MemoryItem:
    """Return the 4-bit weight that is currently multiplied: dequantized as a whole in forward and
    backward (bitsandbytes' gemm_4bit beyond 1,536 tokens, MatMul4Bit.backward), and in full
    precision before quantization.
    """
    phases = frozenset({"forward", "evaluation", "build"}) | BACKWARD
    return MemoryItem("dequantized weight", inputs.dequantized_bytes, phases, "read")


def gathered_parameters(inputs: Inputs) -> Iterator[MemoryItem]:
    """Yield the weights that ZeRO 3 holds in full, in addition to the persistent ones.

    The active module is always gathered, and prefetched weights exist twice while they arrive
    (partition_parameters.py: one flat buffer, then a tensor per parameter). A weight is released
    unless it is used again within `max_reuse_distance` elements. Around the turn from forward to
    backward every element is passed twice, so half of that distance stays gathered
    (partitioned_param_coordinator.py, __params_to_release).
    """
    zero, element = inputs.zero, inputs.element_bytes
    passes = frozenset({"forward", "evaluation"}) | BACKWARD
    # A rank alone uses its shard, the whole weight, in place (partition_parameters.py,
    # NoGatherHandle), unless it is offloaded.
    if zero.stage != 3 or (inputs.shards == 1 and zero.offload_param == "device"):
        return
    units = [
        [tensor.numel for tensor in unit if tensor.numel > zero.persistence_threshold]
        for unit in inputs.shape.body.units
    ]
    total, largest = sum(map(sum, units)), max(map(_largest, units))
    module = max(map(_largest, units[1:-1]), default=0)
    prefetched = min(total, zero.prefetch_bucket + module) if zero.prefetch_bucket else 0
    if inputs.gathers_layers:
        module = inputs.layer_elements
    elif inputs.mlp_tiles > 1:  # then each MLP is gathered as a whole
        module = max(module, max(map(matrix_elements, inputs.shape.body.layers)))
    working = min(total, module + prefetched)
    turn = min(total, max(largest, zero.max_reuse_distance // 2 + module) + prefetched)
    if total <= zero.max_reuse_distance // 2:
        turn = working = total
    for elements, phases in (
        (turn, {"loss", "backward_first"}),
        (max(working, min(largest, total)), {"forward", "backward_last", "evaluation"}),
        (largest, {"build", "save"}),
    ):
        yield MemoryItem("gathered parameters", element * elements, frozenset(phases), "read")
    yield MemoryItem("prefetch copy", element * min(prefetched, total), passes, "read")


def _largest(sizes: list[int]) -> int:
    return max(sizes, default=0)


def pipeline(inputs: Inputs) -> list[MemoryItem]:
    """Return the tensors that a pipeline stage keeps per micro-batch, besides its layers'
    activations.

    pipe/engine.py: one buffer receives both activations and gradients. Received tensors are copied
    and live until their gradient is sent; outputs live until their backward pass. The last stage
    frees its outputs, the losses, only at the end and before that overwrites them, in two slots;
    their graphs keep two inputs and their gradients alive.
    """
    if inputs.stage is None:
        return []
    working = frozenset({"forward", "loss", "evaluation"}) | BACKWARD
    stream = inputs.element_bytes * inputs.shape.hidden_size * inputs.tokens
    # Each tensor-parallel rank sends a part; the receivers combine them.
    sent = stream // (inputs.grid.tensor if inputs.sends_parts else 1)
    parts = [MemoryItem("pipeline: receive buffer", sent, STEPPED, "measured")]
    if inputs.has_head:
        kept = 2 * min(2, inputs.grad_accum) * stream
        return [*parts, MemoryItem("pipeline: inputs", kept, working | {"reduce"}, "measured")]
    in_flight = stream * inputs.in_flight
    parts.append(MemoryItem("pipeline: outputs", sent * inputs.in_flight, working, "read"))
    if inputs.stage:
        parts.append(MemoryItem("pipeline: inputs", in_flight, working, "read"))
        last = frozenset({"backward_last"})
        parts.append(MemoryItem("pipeline: gradient to send", sent, last, "read"))
    if sent < stream:
        whole = "pipeline: output and its gradient put together"
        parts.append(MemoryItem(whole, 2 * stream, BACKWARD, "read"))
    return parts
