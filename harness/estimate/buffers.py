"""Buffers of DeepSpeed's communication, and the weights that ZeRO 3 has gathered at a time."""

from __future__ import annotations

from collections.abc import Iterator

from harness.estimate.inputs import ALWAYS, BACKWARD, STEPPED, Held, Inputs
from harness.estimate.partition import flat_groups, piece
from harness.estimate.states import optimizer_class

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
    largest = max(tensor.numel for tensor in inputs.shape.tensors())
    small = min(zero.reduce_bucket, inputs.parameters)
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
    # Offload takes the norms as gradients arrive.
    taken = BACKWARD if offload else frozenset({"norm"})
    part = min(largest, inputs.parameters // inputs.shards)
    yield Held("norm in fp64", _NORM * part, taken, "read")


def _bucket3(inputs: Inputs) -> Iterator[Held]:
    bucket = inputs.zero.reduce_bucket
    if inputs.zero.contiguous_gradients:
        yield Held("gradient buckets", inputs.comm_bytes * bucket, ALWAYS, "measured")
    largest = max(tensor.numel for tensor in inputs.shape.tensors())
    reduced = max(min(bucket, inputs.parameters), largest)
    if inputs.shards > 1:  # reduce_scatter_coalesced pads and rearranges
        yield Held("communication copy", inputs.comm_bytes * reduced, BACKWARD, "read")
    yield Held("gradient being made", inputs.element_bytes * largest, BACKWARD, "read")
    part = piece(largest, inputs.shards)
    yield Held("norm in fp64", _NORM * part, frozenset({"norm"}), "read")


def _allreduce(inputs: Inputs, kind: str) -> Iterator[Held]:
    """BF16_Optimizer's flat groups are cast one by one (finding 36); the rest is packed."""
    if kind != "BF16_Optimizer":
        size = inputs.comm_bytes * min(inputs.parameters, _ALLREDUCE)
        yield Held("communication copy", size, frozenset({"reduce"}), "measured")
    elif inputs.shards > 1 and inputs.sum_bytes != inputs.comm_bytes:
        largest = max(flat.padded for flat in flat_groups(inputs.groups(), inputs.shards))
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
    if inputs.zero.stage != 3:
        return []
    zero, element = inputs.zero, inputs.element_bytes
    numels = [
        tensor.numel
        for tensor in inputs.shape.tensors()
        if tensor.numel > zero.persistence_threshold
    ]
    total, largest = sum(numels), max(numels, default=0)
    body = [
        tensor.numel
        for layer in inputs.shape.body.layers
        for tensor in layer
        if tensor.numel > zero.persistence_threshold
    ]
    module = max(body, default=0)
    prefetched = min(total, zero.prefetch_bucket + module) if zero.prefetch_bucket else 0
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
    parts = [Held("pipeline: receive buffer", stream, STEPPED, "measured")]
    if inputs.has_head:
        kept = 2 * min(2, inputs.grad_accum) * stream
        return [*parts, Held("pipeline: inputs", kept, working | {"reduce"}, "measured")]
    in_flight = stream * inputs.in_flight
    parts.append(Held("pipeline: outputs", in_flight, working, "read"))
    if inputs.stage:
        parts.append(Held("pipeline: inputs", in_flight, working, "read"))
        sent = frozenset({"backward_last"})
        parts.append(Held("pipeline: gradient to send", stream, sent, "read"))
    return parts
