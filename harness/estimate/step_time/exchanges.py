"""Seconds of the collectives of a step, by the axis that they divide."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from harness.estimate.inputs import Inputs
from harness.estimate.step_time.links import Group
from harness.estimate.step_time.machine import Machine
from harness.layout.expert import EXPERTS
from harness.layout.shape import Shape

OVERLAPPED = 0.85
"""Share of a collective that hides behind computation where there is enough of it."""
KEPT_ELEMENTS = 5e8
"""ZeRO 3 keeps a model of so many elements between its forward and backward pass
(stage3_max_reuse_distance counts both)."""


@dataclass(frozen=True)
class Exchanges:
    """Seconds of a micro-batch's collectives that ZeRO has no part in, on one rank."""

    tensor: float
    """Sums over tensor-parallel ranks; nothing is computed meanwhile."""
    sequence: float
    """All-to-alls around attention."""
    expert: float
    """Tokens to experts and back."""
    stages: float
    """Hidden states and gradients between pipeline stages."""


@dataclass(frozen=True)
class Reductions:
    """Seconds of ZeRO's collectives and copies on one rank; micro-batches decide none of them."""

    weights: float
    """Of a micro-batch: weights that ZeRO 3 gathers, much of it behind computation."""
    gradients: float
    """Of a micro-batch: gradients that are reduced as they come."""
    last: float
    """Of a step: gradients that are reduced at its end."""
    updated: float
    """Of a step: weights that ZeRO 1 and 2 gather after the optimizer."""


def exchanges(inputs: Inputs, machine: Machine, again: float) -> Exchanges:
    """Return the exchanges of one rank of the stage that `inputs` is.

    `again`: share of the layers whose forward pass is computed again.
    """
    return Exchanges(
        tensor=_tensor(inputs, machine, again),
        sequence=_sequence(inputs, machine, again),
        expert=_expert(inputs, machine, again),
        stages=_stages(inputs, machine),
    )


def reductions(inputs: Inputs, machine: Machine) -> Reductions:
    """Return the reductions of one rank of the stage that `inputs` is."""
    grid, zero = inputs.grid, inputs.zero
    node, e = inputs.gpus_per_node, inputs.element_bytes
    data = Group.of(inputs.shards, grid.tensor, node)
    trained, weights = inputs.trained, inputs.parameters
    gradient_bytes = trained * inputs.comm_bytes
    gather = reduce = last = updated = 0.0
    if zero.stage == 3:
        parts = Group.of(zero.secondary_ranks, 1, node) if zero.secondary_ranks > 1 else data
        kept = weights <= min(KEPT_ELEMENTS, zero.max_reuse_distance / 2)
        calls = inputs.shape.num_layers + 2
        gather = data.gather(weights * e, machine, calls)
        gather += 0.0 if kept else parts.gather(weights * e, machine, calls)
        reduce = data.gather(gradient_bytes, machine, calls)
        gather += 2 * calls * machine.gathered_layer_seconds
        reduce += calls * machine.gathered_layer_seconds
    elif zero.stage == 2:
        reduce = data.gather(gradient_bytes, machine)
    elif zero.stage == 1:
        last = data.gather(gradient_bytes, machine)
    else:
        last = data.reduce(gradient_bytes, machine)
    if zero.offload_param != "device":  # a rank's part comes from its host, forward and backward
        gather += 2 * weights * e / inputs.shards / machine.host_link_rate
    if zero.offload_optimizer != "device":
        reduce += gradient_bytes / inputs.shards / machine.host_link_rate
    if zero.stage in (1, 2):
        updated = data.gather(trained * e, machine)
    return Reductions(gather, reduce, last, updated)


def hidden(seconds: float, computation: float) -> float:
    """Return the part of a collective that computation does not hide."""
    return max(seconds - OVERLAPPED * computation, (1 - OVERLAPPED) * seconds)


def _hidden_states(inputs: Inputs) -> float:
    """Bytes of a micro-batch's hidden states on one rank."""
    return float(inputs.tokens * inputs.shape.hidden_size * inputs.element_bytes)


def _tensor(inputs: Inputs, machine: Machine, again: float) -> float:
    """Two sums in a layer's forward pass and two in its backward pass (arXiv 1909.08053, 3)."""
    group = Group.of(inputs.grid.tensor, 1, inputs.gpus_per_node)
    times = inputs.shape.num_layers * (4 + 2 * again) + 2  # embedding and head
    return times * group.reduce(_hidden_states(inputs), machine)


def _sequence(inputs: Inputs, machine: Machine, again: float) -> float:
    """Queries, keys, values and results change from rows to heads and back (arXiv 2309.14509)."""
    shape, grid = inputs.shape, inputs.grid
    group = Group.of(grid.sequence, grid.tensor, inputs.gpus_per_node)
    width = 2 * shape.q_size + 2 * max(shape.kv_size, shape.head_dim * grid.sequence)
    sent = float(inputs.tokens * width * inputs.element_bytes)
    times = 2 + again
    return (
        shape.num_layers
        * times
        * (group.exchange(sent, machine) + (3 * machine.link_latency if grid.sequence > 1 else 0.0))
    )


def _expert(inputs: Inputs, machine: Machine, again: float) -> float:
    """Each token goes to its experts and comes back, forward and backward."""
    shape, grid = inputs.shape, inputs.grid
    if grid.expert == 1:
        return 0.0
    group = Group.of(grid.expert, grid.tensor, inputs.gpus_per_node)
    sent = _hidden_states(inputs) * shape.experts_per_token
    return _sparse_layers(shape) * (4 + 2 * again) * group.exchange(sent, machine)


@lru_cache(maxsize=256)
def _sparse_layers(shape: Shape) -> int:
    return sum(any(t.kind == EXPERTS for t in layer) for layer in shape.body.layers)


def _stages(inputs: Inputs, machine: Machine) -> float:
    """Hidden states come and go, their gradients, too: what a stage in the middle waits for."""
    grid = inputs.grid
    if grid.pipeline == 1:
        return 0.0
    apart = grid.world_size // grid.pipeline
    within = apart * 2 <= inputs.gpus_per_node
    size = _hidden_states(inputs) / (grid.tensor if inputs.sends_parts else 1)
    rate = machine.link_rate if within else machine.network_rate
    latency = machine.link_latency if within else machine.network_latency
    regather = Group.of(grid.tensor, 1, inputs.gpus_per_node).gather(
        _hidden_states(inputs), machine
    )
    return 2 * (latency + size / rate + (regather if inputs.sends_parts else 0.0))
