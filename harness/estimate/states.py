"""Model states as DeepSpeed 0.19.8 allocates them: weights, gradients, master weights, moments."""

from collections.abc import Iterator

from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import (
    ALWAYS,
    BACKWARD,
    FP32,
    STEPPED,
    Evidence,
    MemoryItem,
    Place,
)
from harness.estimate.partition import Flat, piece, sub_groups
from harness.layout.optimizer_table import OPTIMIZERS
from harness.layout.shape import Tensor

_READY = frozenset({"gradients_ready", "norm"})
_REDUCED = _READY | {"reduce"}
_FORWARD = frozenset({"forward", "loss"})


def optimizer_class(inputs: Inputs) -> str:
    """Return DeepSpeed's class that wraps the optimizer (engine.py, _do_optimizer_sanity_check)."""
    zero = inputs.zero
    if zero.stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    if zero.stage in (1, 2):
        wide_sums = inputs.precision == "bf16" and inputs.sum_bytes == FP32
        if wide_sums and zero.stage == 1 and zero.offload_optimizer == "device":
            return "BF16_Optimizer"
        return "DeepSpeedZeroOptimizer"
    if inputs.precision == "fp32":
        return "none"
    if inputs.precision == "bf16" and inputs.grid.pipeline > 1:
        return "BF16_Optimizer"
    return "FP16_Optimizer"


def model_states(inputs: Inputs, rank: int) -> list[MemoryItem]:
    """Return weights, gradients and optimizer states of ZeRO's rank `rank`, on device and host."""
    kinds = {
        "none": _plain,
        "FP16_Optimizer": _fp16,
        "BF16_Optimizer": _bf16,
        "DeepSpeedZeroOptimizer": _zero12,
        "DeepSpeedZeroOptimizer_Stage3": _zero3,
    }
    return [part for part in kinds[optimizer_class(inputs)](inputs, rank) if part.bytes]


def moment_bytes(inputs: Inputs) -> float:
    """Return the mean bytes of optimizer state per trained element, without the master weight."""
    name = inputs.zero.optimizer
    if name == "sgd":
        return FP32 if inputs.zero.momentum else 0
    if inputs.zero.half_moments:
        return 4
    tensors = inputs.trained_tensors
    if name == "muon":  # one moment where Muon updates, Adam's two elsewhere
        return 8 - 4 * sum(t.numel for t in tensors if _by_muon(t)) / inputs.trained
    if name == "adafactor":  # one mean per row and per column of a matrix
        kept = sum(sum(t.shape) if len(t.shape) == 2 else t.numel for t in tensors)
        return FP32 * kept / inputs.trained
    kinds = {kind.json_type.lower(): kind for kind in OPTIMIZERS.values()}
    return kinds[name].state_bytes


def _by_muon(tensor: Tensor) -> bool:
    return len(tensor.shape) >= 2 and tensor.kind not in ("embedding", "head")


def _moments(inputs: Inputs, elements: int) -> int:
    return int(moment_bytes(inputs) * elements)


def master_bytes(inputs: Inputs) -> int:
    """Return the bytes per master weight."""
    return 2 if inputs.zero.half_master else FP32


def _plain(inputs: Inputs, _rank: int) -> Iterator[MemoryItem]:
    element = inputs.element_bytes
    size = element * inputs.trained
    yield MemoryItem("parameters", size + inputs.frozen_bytes, ALWAYS, "measured")
    yield from _full_gradients(inputs, size)
    yield MemoryItem("moments", _moments(inputs, inputs.trained), STEPPED, "measured")
    yield from _temporaries(inputs, max(tensor.numel for tensor in inputs.trained_tensors))


def _temporaries(inputs: Inputs, largest: int) -> Iterator[MemoryItem]:
    """Yield the temporaries of the optimizer for the `largest` tensor that it updates at a time.

    torch's Adam holds a root and a quotient unless it is fused, this harness's optimizers
    (engine/optimizers.py) one update, DeepSpeed's nothing. Adagrad holds a decayed gradient and a
    root; Muon an update and two whole matrices in bf16; 8-bit Adam on a CPU its unpacked moments.
    """
    in_step = frozenset({"step"})
    if inputs.zero.torch_adam and not inputs.zero.fused_adam:
        size = 2 * master_bytes(inputs) * largest
        yield MemoryItem("step temporaries", size, in_step, "measured")
        return
    name = inputs.zero.optimizer
    unpacked = 5 if inputs.accelerator == "cpu" else 0
    copies = {"adamw": 0, "adam": 0, "adagrad": 2, "adamw8bit": unpacked}.get(name, 1)
    whole = 0
    if name == "muon":
        whole = 4 * max((t.numel for t in inputs.trained_tensors if _by_muon(t)), default=0)
    yield MemoryItem("step temporaries", FP32 * copies * largest + whole, in_step, "read")


def _full_gradients(inputs: Inputs, size: int) -> Iterator[MemoryItem]:
    """Yield unsharded gradients, alive from the first micro-batch's backward pass to the step."""
    lives = frozenset({"backward_last", "cast", "step"}) | _REDUCED
    yield MemoryItem("gradients", size, lives, "measured")
    yield _before_layers(inputs, size, "measured")


def _before_layers(inputs: Inputs, size: int, evidence: Evidence) -> MemoryItem:
    """Return the unsharded gradients while activations are at their peak: all of them from the
    second micro-batch on; in the first, the output layer's, which may be tied to the embedding.
    """
    if inputs.accumulates:
        return MemoryItem("gradients", size, _FORWARD | {"backward_first"}, evidence)
    return _of_head(inputs, size, evidence)


def _of_head(inputs: Inputs, size: int, evidence: Evidence) -> MemoryItem:
    head = [t.numel for t in inputs.trained_tensors if t.kind == "head"]
    if not head:
        head = [t.numel for t in inputs.trained_tensors if t.kind == "embedding"][:1]
    share = sum(head) / inputs.trained if inputs.has_head else 0.0
    return MemoryItem("gradients", int(share * size), frozenset({"backward_first"}), evidence)


def _fp16(inputs: Inputs, _rank: int) -> Iterator[MemoryItem]:
    # fp16/fused_optimizer.py: moments exist from the start; a step holds a list of fp32 gradients
    # and its copy.
    count, size = inputs.trained, inputs.element_bytes * inputs.trained
    yield MemoryItem("parameters", size + inputs.frozen_bytes, ALWAYS, "read")
    yield MemoryItem("master", FP32 * count, ALWAYS, "read")
    yield MemoryItem("moments", _moments(inputs, count), ALWAYS, "read")
    yield from _full_gradients(inputs, size)
    yield MemoryItem("fp32 gradients", FP32 * count, frozenset({"cast", "step"}), "read")
    yield MemoryItem("fp32 gradients copy", FP32 * count, frozenset({"cast"}), "read")


def _bf16(inputs: Inputs, _rank: int) -> Iterator[MemoryItem]:
    # bf16_optimizer.py: permanent gradient sums of the whole model; the bf16 gradients are freed
    # when they have been added (engine/deepspeed_0_19/between_steps.py).
    flats = inputs.flats
    whole, shard = sum(flat.padded for flat in flats), sum(flat.shard for flat in flats)
    yield MemoryItem("parameters", 2 * whole + inputs.frozen_bytes, ALWAYS, "measured")
    yield MemoryItem("master", FP32 * shard, ALWAYS, "measured")
    yield MemoryItem("moments", _moments(inputs, shard), STEPPED, "measured")
    yield MemoryItem("gradient sums", inputs.sum_bytes * whole, ALWAYS, "measured")
    if inputs.sum_bytes != FP32:
        yield MemoryItem("fp32 gradients", FP32 * shard, frozenset({"step"}), "read")
    size = 2 * inputs.trained
    yield MemoryItem("gradients", size, frozenset({"backward_last"}), "measured")
    yield _of_head(inputs, size, "measured")
    yield from _temporaries(inputs, max(flat.shard for flat in flats))


def _zero12(inputs: Inputs, rank: int) -> Iterator[MemoryItem]:
    flats = inputs.flats
    shard = sum(flat.shard for flat in flats)
    where = inputs.zero.offload_optimizer
    where = "host" if where == "nvme" else where
    trained = inputs.element_bytes * sum(flat.padded for flat in flats)
    yield MemoryItem("parameters", trained + inputs.frozen_bytes, ALWAYS, "measured")
    yield MemoryItem("master", master_bytes(inputs) * shard, ALWAYS, "measured", where)
    yield MemoryItem("moments", _moments(inputs, shard), STEPPED, "measured", where)
    if where == "host":
        yield from _offloaded_gradients12(inputs, flats, rank, shard)
    else:
        yield from _gradients12(inputs, flats, rank, shard)
        yield from _temporaries(inputs, max(flat.shard for flat in flats))


def _widened(inputs: Inputs) -> bool:
    """Return True if gradients are summed in fp32 although the model computes in 16 bits."""
    return inputs.element_bytes != FP32 and inputs.sum_bytes == FP32


def _gradients12(inputs: Inputs, flats: list[Flat], rank: int, shard: int) -> Iterator[MemoryItem]:
    element = inputs.element_bytes
    if _widened(inputs):
        # One flat buffer (_build_compact_grad_partition_buffer) that the step uses directly. Stage
        # 1 allocates it at the accumulation boundary, stage 2 in the first reduction, for all
        # micro-batches.
        begins = BACKWARD if inputs.zero.stage == 2 else frozenset()
        begins |= _FORWARD if inputs.zero.stage == 2 and inputs.grad_accum > 1 else frozenset()
        lives = begins | _REDUCED | {"cast", "step"}
        yield MemoryItem("gradients", FP32 * shard, lives, "measured")
    else:
        indices = [(flat, flat.index(rank)) for flat in flats]
        whole = sum(flat.whole[index] + flat.end_padding(index) for flat, index in indices)
        begins = BACKWARD if inputs.zero.stage == 2 else frozenset()
        lives = begins | _REDUCED | {"cast", "step"}
        yield MemoryItem("gradients", element * whole, lives, "measured")
        if inputs.zero.stage == 2 and inputs.grad_accum > 1:
            # The sums so far, in addition to what this backward pass reduces.
            yield MemoryItem("gradients", element * whole, _FORWARD | BACKWARD, "read")
        # Per group: the flat copy, and the fp32 gradient for the optimizer.
        largest = max(flat.shard for flat in flats)
        flat_lives = frozenset({"cast"} if element != FP32 else {"cast", "step"})
        yield MemoryItem("flat gradients", element * largest, flat_lives, "measured")
        if element != FP32:
            cast = master_bytes(inputs) * largest
            yield MemoryItem("fp32 gradients", cast, frozenset({"cast", "step"}), "measured")
    if inputs.zero.stage == 1:
        yield from _unreduced(inputs, flats, rank)


def _unreduced(inputs: Inputs, flats: list[Flat], rank: int) -> Iterator[MemoryItem]:
    """Yield stage 1's unsharded gradients, kept until the boundary, over all micro-batches."""
    size = inputs.sum_bytes * inputs.trained
    yield MemoryItem("gradients", size, frozenset({"backward_last", "reduce"}), "measured")
    yield _before_layers(inputs, size, "read")
    if _widened(inputs):
        # Only parameters of this rank's shard free their sum. The others' stay until the step, in
        # the bucket or, if larger than it, separately.
        bucket = inputs.zero.reduce_bucket
        alone = sum(flat.elsewhere(flat.index(rank), bucket) for flat in flats)
        left = FP32 * (alone + bucket) if inputs.shards > 1 else 0
        yield MemoryItem("gradients of other shards", left, _READY | {"cast"}, "measured")


def _offloaded_gradients12(
    inputs: Inputs, flats: list[Flat], rank: int, shard: int
) -> Iterator[MemoryItem]:
    element = inputs.element_bytes
    largest = max(numel for flat in flats for numel in flat.numels)
    yield MemoryItem("fp32 gradients", master_bytes(inputs) * shard, ALWAYS, "measured", "host")
    yield MemoryItem("parameter staging", element * shard, ALWAYS, "measured", "host")
    yield MemoryItem("gradient staging", element * largest, ALWAYS, "measured", "host")
    yield MemoryItem("gradient staging", element * largest, ALWAYS, "measured")
    if _widened(inputs):
        yield MemoryItem("gradients", FP32 * shard, _REDUCED, "measured")
    elif inputs.grad_accum > 1 and inputs.zero.stage == 2:
        whole = sum(flat.whole[flat.index(rank)] for flat in flats)
        yield MemoryItem("gradient sums", element * whole, STEPPED, "measured", "host")
    if inputs.zero.stage == 1:
        yield from _unreduced(inputs, flats, rank)


def _zero3(inputs: Inputs, _rank: int) -> Iterator[MemoryItem]:
    zero, element = inputs.zero, inputs.element_bytes
    groups = [(group, inputs.shards_of(group)) for group in inputs.groups()]
    pieces = sum(piece(tensor.numel, shards) for group, shards in groups for tensor in group)
    limit = zero.sub_group_size
    subs = [size for group, shards in groups for size in sub_groups([group], shards, limit)]
    offload = zero.offload_optimizer
    away = sum(subs[int((1 - zero.offload_ratio) * len(subs)) :]) if offload != "device" else 0
    frozen = sum(piece(tensor.numel, inputs.shards) for tensor in inputs.frozen_tensors)
    size = element * (pieces + frozen)
    yield MemoryItem("parameters", size, ALWAYS, "measured", zero.offload_param)
    gathered = [*groups, (inputs.frozen_tensors, inputs.shards)]
    persistent = sum(
        tensor.numel
        for group, shards in gathered
        for tensor in group
        if tensor.numel <= zero.persistence_threshold and shards > 1
    )
    yield MemoryItem("persistent parameters", element * persistent, STEPPED, "measured")
    optimizer: tuple[tuple[Place, int], ...] = (("device", pieces - away), (offload, away))
    for where, count in optimizer:
        yield MemoryItem("master", master_bytes(inputs) * count, ALWAYS, "measured", where)
        yield MemoryItem("moments", _moments(inputs, count), STEPPED, "measured", where)
    place: Place = "host" if offload != "device" else "device"
    yield MemoryItem("gradients", inputs.sum_bytes * pieces, ALWAYS, "measured", place)
    yield MemoryItem("fp32 gradients", master_bytes(inputs) * away, ALWAYS, "measured", offload)
    if offload == "device":
        largest = max(subs)
        # The optimizer steps on the sums themselves unless their precision differs.
        cast = master_bytes(inputs) * largest if inputs.sum_bytes != master_bytes(inputs) else 0
        yield MemoryItem("fp32 gradients", cast, frozenset({"cast", "step"}), "read")
        yield from _temporaries(inputs, largest)
    if zero.secondary_ranks > 1:
        # hpZ: sharded again in every forward pass, freed in every step.
        second = element * inputs.parameters // min(zero.secondary_ranks, inputs.shards)
        yield MemoryItem("secondary parameters", second, ALWAYS - {"between_steps"}, "measured")
