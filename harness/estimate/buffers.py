"""Buffers of DeepSpeed's communication, and the weights that ZeRO 3 has gathered at a time."""

from __future__ import annotations

from collections.abc import Iterator

from harness.estimate.held import ALWAYS, BACKWARD, STEPPED, Held
from harness.estimate.inputs import Inputs
from harness.estimate.partition import piece
from harness.estimate.states import optimizer_class
from harness.layout.recompute import matrix_elements

# Elements that stage 0 reduces at once (engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
_ALLREDUCE = 500_000_000
# Norms are summed in fp64 wherever the device has it (zero/utils.py, get_norm_dtype): a copy of one
# gradient at a time.
_NORM = 8  # bytes


def communication(inputs: Inputs) -> list[Held]:
    """Buffers in which gradients are reduced."""
    kind = optimizer_class(inputs)
    if kind == "DeepSpeedZeroOptimizer":
        buffers = _bucket12(inputs)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        buffers = _bucket3(inputs)
    else:
        buffers = _allreduce(inputs, kind)
    return [part for part in buffers if part.bytes]


def _bucket12(inputs: Inputs) -> Iterator[Held]:
    zero = inputs.zero
    wide = zero.stage == 1 and inputs.sum_bytes != inputs.element_bytes
    element = inputs.sum_bytes if wide else inputs.element_bytes
    if zero.contiguous_gradients or zero.offload_optimizer != "device":
        # Made in every backward, of stage 1 in the first, twice when reduction overlaps it
        # (setup_buckets); under a pipeline it never does, and the reduction makes another.
        pipelined = inputs.stage is not None
        size = element * zero.reduce_bucket * (2 if zero.overlap_comm and not pipelined else 1)
        yield Held("gradient buckets", size, BACKWARD | {"reduce"}, "measured")
        if zero.stage == 1 and inputs.accumulates:
            yield Held("gradient buckets", size, frozenset({"forward", "loss"}), "read")
        if pipelined:
            yield Held("gradient buckets", size, frozenset({"reduce"}), "read")
    # Stage 2 with fp32 sums reduces in fp32 what it collected in 16 bits.  A parameter larger than
    # the bucket is reduced by itself, under offload from a clone.
    largest = max(tensor.numel for tensor in inputs.trained_tensors)
    small = min(zero.reduce_bucket, inputs.trained)
    offload = zero.offload_optimizer != "device"
    if zero.stage == 2 and inputs.sum_bytes != inputs.element_bytes:
        copy = inputs.sum_bytes * max(small, largest)
    elif inputs.comm_bytes > inputs.element_bytes:  # widened, one that is reduced by itself, too
        copy = inputs.comm_bytes * max(small, largest)
    else:
        copy = inputs.comm_bytes * small
    if offload and largest > small:
        copy += inputs.element_bytes * largest
    if inputs.shards > 1:
        yield Held("communication copy", copy, BACKWARD, "read")
    if zero.stage == 2:
        made = inputs.element_bytes * largest
        yield Held("gradient being made", made, BACKWARD, "read")
    part = min(largest, inputs.sharded_parameters)
    if not offload:
        yield Held("norm in fp64", _NORM * part, frozenset({"norm"}), "read")
        return
    # Offload takes the norms as gradients arrive: the embedding's when activations are gone.
    yield Held("norm in fp64", _NORM * part, frozenset({"backward_last"}), "read")
    early = max((t.numel for t in inputs.trained_tensors if t.kind != "embedding"), default=0)
    part = min(early, inputs.sharded_parameters)
    yield Held("norm in fp64", _NORM * part, frozenset({"backward_first"}), "read")


def _bucket3(inputs: Inputs) -> Iterator[Held]:
    bucket = inputs.zero.reduce_bucket
    if inputs.zero.contiguous_gradients:
        yield Held("gradient buckets", inputs.comm_bytes * bucket, ALWAYS, "measured")
    largest = max(tensor.numel for tensor in inputs.trained_tensors)
    # reduce_scatter_coalesced puts the shares of a bucket together anew; a gradient larger than it
    # is reduced by itself, and where it is, unless it does not divide.
    alone = [
        tensor.numel
        for group in inputs.groups()
        for tensor in group
        if tensor.numel > bucket and tensor.numel % inputs.shards_of(group)
    ]
    copied = max([min(bucket, inputs.trained), *alone])
    if inputs.comm_bytes != inputs.element_bytes:  # in another type before that
        copied += max(min(bucket, inputs.trained), largest)
    yield Held("communication copy", inputs.comm_bytes * copied, BACKWARD, "read")
    # Those of a layer that is gathered as a whole are reduced when it has given its input's.
    made = max(largest, inputs.layer_elements) if inputs.gathers_layers else largest
    yield Held("gradient being made", inputs.element_bytes * made, BACKWARD, "read")
    part = max(
        piece(max(tensor.numel for tensor in group), inputs.shards_of(group))
        for group in inputs.groups()
    )
    yield Held("norm in fp64", _NORM * part, frozenset({"norm"}), "read")


def _allreduce(inputs: Inputs, kind: str) -> Iterator[Held]:
    """BF16_Optimizer's flat groups are cast one by one (finding 36); the rest is packed."""
    if kind != "BF16_Optimizer":
        size = inputs.comm_bytes * min(inputs.trained, _ALLREDUCE)
        yield Held("communication copy", size, frozenset({"reduce"}), "measured")
    elif inputs.shards > 1 and inputs.sum_bytes != inputs.comm_bytes:
        largest = max(flat.padded for flat in inputs.flats)
        size = inputs.comm_bytes * largest
        yield Held("communication copy", size, frozenset({"reduce"}), "measured")


def gathered_parameters(inputs: Inputs) -> list[Held]:
    """Weights that ZeRO 3 holds in full besides the persistent ones.

    The module at work is always gathered, and what is prefetched is there twice while it arrives
    (partition_parameters.py: one flat buffer, then a tensor per parameter).  A weight is released
    unless it is used again within `max_reuse_distance` elements: before the turn from forward to
    backward every element is passed twice, so half of that distance stays gathered
    (partitioned_param_coordinator.py, __params_to_release).
    """
    if inputs.zero.stage != 3 or _has_all(inputs):
        return []
    zero, element = inputs.zero, inputs.element_bytes
    units = [
        [tensor.numel for tensor in unit if tensor.numel > zero.persistence_threshold]
        for unit in inputs.shape.body.units
    ]
    total, largest = sum(map(sum, units)), max(map(_largest, units))
    module = max(map(_largest, units[1:-1]), default=0)
    prefetched = min(total, zero.prefetch_bucket + module) if zero.prefetch_bucket else 0
    if inputs.gathers_layers:
        module = inputs.layer_elements
    elif inputs.mlp_tiles > 1:  # then an MLP is gathered as a whole
        module = max(module, max(map(matrix_elements, inputs.shape.body.layers)))
    working = min(total, module + prefetched)
    turn = min(total, max(largest, zero.max_reuse_distance // 2 + module) + prefetched)
    if total <= zero.max_reuse_distance // 2:
        turn = working = total
    copy = element * min(prefetched, total)
    return [
        part
        for part in (
            Held(
                "gathered parameters", element * turn, frozenset({"loss", "backward_first"}), "read"
            ),
            Held(
                "gathered parameters",
                element * max(working, min(largest, total)),
                frozenset({"forward", "backward_last", "evaluation"}),
                "read",
            ),
            Held("prefetch copy", copy, frozenset({"forward", "evaluation"}) | BACKWARD, "read"),
            Held("gathered parameters", element * largest, frozenset({"build", "save"}), "read"),
        )
        if part.bytes
    ]


def _has_all(inputs: Inputs) -> bool:
    """True if a rank's shard is the whole weight, on the device: it is used as it lies there
    (partition_parameters.py, NoGatherHandle).
    """
    return inputs.shards == 1 and inputs.zero.offload_param == "device"


def dequantized_weights(inputs: Inputs) -> list[Held]:
    """The weight in 4 bits that something is multiplied by: dequantized as a whole, forward and
    backward (bitsandbytes' gemm_4bit beyond 1,536 tokens, MatMul4Bit.backward), and before it is
    quantized.
    """
    size, working = inputs.dequantized_bytes, frozenset({"build", "forward", "evaluation"})
    return [Held("dequantized weight", size, working | BACKWARD, "read")] if size else []


def _largest(sizes: list[int]) -> int:
    return max(sizes, default=0)


def pipeline(inputs: Inputs) -> list[Held]:
    """Tensors that a pipeline stage keeps of each micro-batch besides its layers' activations.

    pipe/engine.py: one buffer receives activations and gradients alike; what was received is
    copied, and lives until its gradient is sent; outputs live until their backward pass.  The last
    stage lets go of its outputs, the losses, when all is done, and before only overwrites them, in
    two slots: through their graphs two inputs and their gradients stay.
    """
    if inputs.stage is None:
        return []
    working = frozenset({"forward", "loss", "evaluation"}) | BACKWARD
    stream = inputs.element_bytes * inputs.shape.hidden_size * inputs.tokens
    # Tensor-parallel ranks send a part each, and put together what they received.
    sent = stream // (inputs.grid.tensor if inputs.sends_parts else 1)
    parts = [Held("pipeline: receive buffer", sent, STEPPED, "measured")]
    if inputs.has_head:
        kept = 2 * min(2, inputs.grad_accum) * stream
        return [*parts, Held("pipeline: inputs", kept, working | {"reduce"}, "measured")]
    in_flight = stream * inputs.in_flight
    parts.append(Held("pipeline: outputs", sent * inputs.in_flight, working, "read"))
    if inputs.stage:
        parts.append(Held("pipeline: inputs", in_flight, working, "read"))
        last = frozenset({"backward_last"})
        parts.append(Held("pipeline: gradient to send", sent, last, "read"))
    if sent < stream:
        whole = "pipeline: output and its gradient put together"
        parts.append(Held(whole, 2 * stream, BACKWARD, "read"))
    return parts
