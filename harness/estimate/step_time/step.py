"""A step as a timeline of the slowest rank, and the term that dominates it.

seconds = micro-batches x (forward + backward + again + copies + exchanges) + fill of the pipeline
          + reduction of gradients + optimizer + gathering of weights
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.estimate.activations import offloaded_bytes
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import Once, call
from harness.estimate.states import master_bytes, moment_bytes, optimizer_class
from harness.estimate.step_time.exchanges import (
    OVERLAPPED,
    Reductions,
    exchanges,
    hidden,
    reductions,
)
from harness.estimate.step_time.layer import Passes, Seconds, head_passes, layer_passes
from harness.estimate.step_time.machine import Machine, RateEvidence
from harness.layout.attention_table import seen_by
from harness.layout.recompute import REVERSIBLE, is_checkpointed, runs_again
from harness.layout.shape import flops_per_token


def optimizer_seconds(inputs: Inputs, machine: Machine) -> float:
    """Return the seconds of the optimizer on one rank, including copies between host and GPU.

    It reads and writes master weights and every state, and reads gradients in the precision of the
    master weights. Master weights on the device are read again and written as model weights.
    """
    zero = inputs.zero
    elements = inputs.sharded_parameters if zero.stage else inputs.trained
    width, master = inputs.element_bytes, master_bytes(inputs)
    states = elements * 2 * (master + moment_bytes(inputs))
    moved = states + elements * (master + width)
    norm = elements * inputs.sum_bytes / machine.memory_rate
    if zero.offload_optimizer == "device":
        return (moved + elements * master) / machine.memory_rate + norm
    copied = elements * (inputs.sum_bytes + width) / machine.host_link_rate
    computed = moved / machine.host_memory_rate
    if zero.offload_optimizer == "nvme":
        computed = max(computed, states / machine.nvme_rate)
    return norm + copied + zero.offload_ratio * computed


_STRENGTH: tuple[RateEvidence, ...] = ("measured", "fitted", "read", "guessed")
_ORDER = _STRENGTH.index
_TABLES = tomllib.loads(Path(__file__).with_name("terms.toml").read_text(encoding="utf-8"))
_RATES: dict[str, list[str]] = _TABLES["rates"]
"""Rates that determine a term, for any layout."""
NEVER_LARGE = {"sequence", "expert"}
"""Terms on which no published run spends a tenth of its step."""
_EXCHANGES = {"tensor", "sequence", "expert", "stages", "weights", "gradients"}


def terms_evidence(
    terms: Iterable[str], inputs: Inputs, machine: Machine
) -> dict[str, RateEvidence]:
    """Return the weakest evidence for each term's rates, by key of TERMS."""
    # Recurrent kernels were never compared with a run.
    guessed = {"serial", *(("elements", "again", "bubble") if has_states(inputs) else ())}
    return {
        term: "guessed" if term in guessed else _evidence(term, inputs, dict(machine.rate_evidence))
        for term in terms
    }


def _evidence(term: str, inputs: Inputs, by_rate: dict[str, RateEvidence]) -> RateEvidence:
    weakest = max((by_rate.get(rate, "guessed") for rate in _rates(term, inputs)), key=_ORDER)
    return "guessed" if term in NEVER_LARGE and weakest != "measured" else weakest


def has_states(inputs: Inputs) -> bool:
    """Return True if layers carry a state from token to token."""
    distinct = {id(layer): layer for layer in inputs.shape.body.layers}  # called thousands of times
    return any(tensor.kind == "states" for layer in distinct.values() for tensor in layer)


def _rates(term: str, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of a term's rates, which are fields of Machine."""
    if term in _EXCHANGES:
        crosses = inputs.grid.world_size > inputs.gpus_per_node
        hosts = term in ("weights", "gradients") and _uses_host(inputs)
        return (
            "link_rate",
            *(["network_rate"] if crosses else []),
            *(["host_link_rate"] if hosts else []),
        )
    if term == "optimizer" and _uses_host(inputs):
        drives = inputs.zero.offload_optimizer == "nvme"
        return ("host_memory_rate", "host_link_rate", *(["nvme_rate"] if drives else []))
    return tuple(_RATES[term])


def _uses_host(inputs: Inputs) -> bool:
    zero = inputs.zero
    return {zero.offload_optimizer, zero.offload_param} != {"device"}


HOOK_SECONDS = {True: (4.0e-3, 0.0), False: (6.9e-3, 6.4e-3)}
"""Host seconds of ZeRO 3's hooks on a Llama layer, forward and backward, besides its launches: for
layers gathered as a whole (True) and module by module (False); measured like LAUNCH_SECONDS."""

TERMS: dict[str, str] = _TABLES["names"]
"""Terms of a step, with the names shown to users."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the slowest pipeline stage."""

    inputs: Inputs
    machine: Machine
    terms: dict[str, float]
    """Seconds that nothing else hides, by key of TERMS."""

    @cached_property
    def seconds(self) -> float:
        """Seconds per step."""
        return sum(self.terms.values())

    @property
    def bound(self) -> str:
        """The term that takes longest."""
        return max(self.terms, key=lambda term: self.terms[term])

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        run = self.inputs
        return run.micro_batch * run.grad_accum * run.grid.data * run.seq_len

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.inputs.grid.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (layout/shape.py: flops_per_token)."""
        run = self.inputs
        seen = seen_by(run.attention, dict(run.attention_sizes))
        count = run.adapters.flops_per_token if run.adapters else flops_per_token
        flops = count(run.shape, run.seq_len, seen)
        return flops * self.tokens_per_s_per_gpu / self.machine.peak_flops

    @property
    def evidence(self) -> str:
        """The evidence for the machine's rates; "guessed" with recurrent layers unless measured."""
        if self.machine.evidence != "measured" and has_states(self.inputs):
            return "guessed"
        return self.machine.evidence

    def to_json(self) -> dict[str, Any]:
        """Return plain values under stable keys, in seconds and tokens."""
        shown = [term for term, seconds in self.terms.items() if seconds]
        evidence = terms_evidence(shown, self.inputs, self.machine)
        return {
            "step_time_s": round(self.seconds, 4),
            "tokens_per_s_per_gpu": round(self.tokens_per_s_per_gpu, 2),
            "mfu": round(self.mfu, 4),
            "bound": TERMS[self.bound],
            "terms_s": {TERMS[k]: round(v, 4) for k, v in self.terms.items() if v},
            "evidence": self.evidence,
            "terms_evidence": {TERMS[term]: weakest for term, weakest in evidence.items()},
        }


def estimate_time(inputs: Inputs, machine: Machine, once: Once = call) -> StepTime:
    """Return the time of a run's step on such machines."""
    stages = [
        (once(computed, inputs, stage, machine, once), once(synchronised, inputs, stage, machine))
        for stage in range(inputs.grid.pipeline)
    ]
    terms = step_terms(stages, inputs.grad_accum, inputs.zero.overlap_comm, machine)
    return StepTime(inputs, machine, terms)


@dataclass(frozen=True)
class Computed:
    """Seconds of a micro-batch on one pipeline stage that ZeRO does not affect."""

    terms: dict[str, float]
    """Seconds by key of TERMS."""
    passes: float
    """Seconds of the forward and backward passes, and of recomputation."""
    backward: float
    """Seconds of the backward pass and of recomputation."""
    idle: tuple[float, float]
    """Host time left in the layers' forward and backward passes while the GPU computes."""
    called_again: float
    """Share of the layers whose forward pass is called again in the backward pass."""


@dataclass(frozen=True)
class Synchronised:
    """Seconds on one pipeline stage that depend on ZeRO and the optimizer, but not on the size of a
    micro-batch.
    """

    reductions: Reductions
    optimizer: float
    accumulated: tuple[float, float]
    """Seconds to add a micro-batch's gradients to sums of a higher precision: the step's first, and
    each other."""
    hooks: tuple[float, float, float]
    """Host seconds of ZeRO 3's hooks per micro-batch, forward, backward, and in a forward pass that
    is called again."""
    hides_hooks: bool
    """False for a single rank of ZeRO 3: it waits for the device after each "gather" (DeepSpeed's
    NoGatherHandle.wait)."""


def computed(run: Inputs, stage: int, machine: Machine, once: Once) -> Computed:
    """Return the seconds of a micro-batch on a pipeline stage."""
    inputs = run.of_stage(stage)
    passes, repeated = _passes(inputs, machine, once)
    layers = inputs.shape.num_layers
    exchanged = exchanges(inputs, machine, repeated / layers if layers else 0.0)
    places = range(inputs.first_layer, inputs.first_layer + layers)
    checkpointed = sum(is_checkpointed(inputs.checkpointing, place) for place in places)
    both = passes.forward + passes.backward
    again = passes.again.total
    copies = 2 * offloaded_bytes(inputs) / machine.pinned_rate  # not overlapped: in stream order
    terms = {**vars(both), "again": again, "copies": copies, **exchanged}
    idle = passes.forward.idle, passes.backward.idle + passes.again.idle
    del terms["idle"]
    return Computed(
        terms,
        both.total + again,
        passes.backward.total + again,
        idle,
        called_again=checkpointed / layers if layers else 0.0,
    )


def _accumulated(inputs: Inputs, machine: Machine) -> tuple[float, float]:
    """Return Synchronised.accumulated. BF16_Optimizer copies the first micro-batch's gradients and
    adds the others; ZeRO 2 adds all to zeros.
    """
    if inputs.sum_bytes == inputs.element_bytes:
        return 0.0, 0.0
    elements = inputs.sharded_parameters if inputs.zero.stage >= 2 else inputs.trained
    # How often a sum is read or written: in ZeRO 2's buffer, and where each gradient is cast first.
    times = (3, 2) if inputs.zero.stage == 2 else (3, 4)
    times = (1, 2) if optimizer_class(inputs) == "BF16_Optimizer" else times
    first, other = (inputs.element_bytes + n * inputs.sum_bytes for n in times)
    return elements * first / machine.memory_rate, elements * other / machine.memory_rate


def synchronised(run: Inputs, stage: int, machine: Machine) -> Synchronised:
    """Return the seconds of ZeRO and the optimizer on a pipeline stage."""
    inputs, hooks = run.of_stage(stage), (0.0, 0.0, 0.0)
    if inputs.zero.stage == 3 and machine.is_asynchronous:
        layers = inputs.shape.num_layers * machine.launch_scale
        forward, backward = HOOK_SECONDS[inputs.gathers_layers]
        # Hooks of a whole layer are outside of what is called again.
        again = 0.0 if inputs.gathers_layers else forward
        hooks = layers * forward, layers * backward, layers * again
    return Synchronised(
        reductions(inputs, machine),
        optimizer_seconds(inputs, machine),
        _accumulated(inputs, machine),
        hooks,
        hides_hooks=inputs.shards > 1,
    )


def step_terms(
    stages: Sequence[tuple[Computed, Synchronised]],
    micro_batches: int,
    overlap_comm: bool,
    machine: Machine,
) -> dict[str, float]:
    """Return the seconds of a step by key of TERMS; the pipeline waits for its slowest stage."""
    overlaps = overlap_comm and machine.is_asynchronous
    shown = [_not_hidden(work, each.reductions, overlaps) for work, each in stages]
    hooks = [_hooks_shown(work, each) for work, each in stages]
    sums = [
        (each.accumulated[0] + (micro_batches - 1) * each.accumulated[1]) / micro_batches
        for _, each in stages
    ]
    seconds = [
        sum(work.terms.values()) + summed + weights + gradients + own
        for (work, _), summed, (weights, gradients, _), own in zip(
            stages, sums, shown, hooks, strict=True
        )
    ]
    slowest = max(range(len(stages)), key=lambda stage: seconds[stage])
    once = [
        last + each.reductions.updated + each.optimizer
        for (_, each), (_, _, last) in zip(stages, shown, strict=True)
    ]
    final = max(range(len(stages)), key=lambda stage: once[stage])
    terms = {name: micro_batches * value for name, value in stages[slowest][0].terms.items()}
    terms["elements"] += micro_batches * sums[slowest]
    terms["launches"] += micro_batches * hooks[slowest]
    terms["weights"] = micro_batches * shown[slowest][0] + stages[final][1].reductions.updated
    terms["gradients"] = micro_batches * shown[slowest][1] + shown[final][2]
    terms["optimizer"] = stages[final][1].optimizer
    terms["host"] = machine.step_seconds
    terms["bubble"] = sum(seconds) - seconds[slowest]
    return {name: terms[name] for name in TERMS}


def _hooks_shown(work: Computed, each: Synchronised) -> float:
    """Return the seconds of ZeRO 3's hooks that the GPU's work does not hide."""
    forward, backward, again = each.hooks
    both = forward, backward + work.called_again * again
    idle = work.idle if each.hides_hooks else (0.0, 0.0)
    return sum(max(0.0, own - hidden) for own, hidden in zip(both, idle, strict=True))


def _not_hidden(
    work: Computed, reductions: Reductions, overlaps: bool
) -> tuple[float, float, float]:
    """Return the seconds that nothing hides: of gathering weights, of reducing gradients as they
    come, and of reducing them at the end. Without overlap (overlap_comm), nothing is hidden.
    """
    if not overlaps:
        return reductions.weights, reductions.gradients, reductions.last
    if reductions.weights:
        together = hidden(reductions.weights + reductions.gradients, work.passes)
        share = reductions.weights / (reductions.weights + reductions.gradients)
        return share * together, (1 - share) * together, reductions.last
    return (
        0.0,
        hidden(reductions.gradients, work.backward),
        hidden(reductions.last, OVERLAPPED * work.backward),
    )


def _passes(inputs: Inputs, machine: Machine, once: Once) -> tuple[Passes, int]:
    """Return the seconds of a stage's layers and head, and the number of recomputed layers."""
    way, total, repeated = inputs.checkpointing, Passes(Seconds(), Seconds()), 0
    for layers in inputs.layers_alike:
        passes, count = once(layer_passes, inputs, layers[0], machine), len(layers)
        layer = inputs.first_layer + layers[0]
        again = Seconds()
        if runs_again(way, layer):
            again, repeated = passes.forward, repeated + count
        elif is_checkpointed(way, layer):  # everything except costly operations
            again = Seconds(elements=passes.forward.elements)
        if inputs.mlp_tiles > 1:
            again += _tiles_again(inputs, passes.again, layer)
        total += Passes(passes.forward, passes.backward, again).times(count)
    if inputs.has_head:
        total += head_passes(inputs, machine)
    return total, repeated


def _tiles_again(inputs: Inputs, mlp: Seconds, layer: int) -> Seconds:
    """Return the seconds in which a layer's tiled MLP is recomputed in addition to its checkpointed
    layer (layout/recompute.py: flops_again). `mlp`: its forward pass.
    """
    way, last = inputs.checkpointing, 1 / inputs.mlp_tiles
    if way == REVERSIBLE or not is_checkpointed(way, layer):
        return mlp
    if runs_again(way, layer):
        return mlp.times(1 - last)
    # `selective` keeps no products of tiles; its elements are counted with the layer's.
    return Seconds(mlp.products * (2 - last), elements=mlp.elements * (1 - last))
