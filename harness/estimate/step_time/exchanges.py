"""Times of exchanges between ranks, by the links that they use.

Assumes rings, as in NCCL: each rank sends (n - 1) / n of the whole once for an all-gather or a
reduce-scatter, and twice for an all-reduce (Patarasuk and Yuan, 2009). Between nodes a ring enters
and leaves each node once, carried by all of the node's network cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.estimate import traffic
from harness.estimate.inputs import Inputs
from harness.estimate.step_time.machine import Machine


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and their placement on nodes."""

    size: int
    nodes: int
    """Number of nodes that the group spans."""
    sharing: int
    """Number of groups of the same kind that share a node's network."""

    @classmethod
    def of(cls, size: int, stride: int, gpus_per_node: int) -> Group:
        """Return the group of `size` ranks that are `stride` ranks apart."""
        span = size * stride
        if span <= gpus_per_node:
            return cls(size, 1, 1)
        nodes = min(size, -(-span // gpus_per_node))
        return cls(size, nodes, max(1, min(stride, gpus_per_node)))

    def rate(self, machine: Machine) -> float:
        """Return the bytes per second at each point of the group's ring."""
        if self.nodes == 1:
            return machine.link_rate
        node = machine.network_rate * machine.gpus_per_node / self.sharing
        return min(machine.link_rate, node) if self.size > self.nodes else node

    def gather(self, size: float, machine: Machine, calls: int = 1) -> float:
        """Return the seconds to gather `size` bytes on every rank, each of which has a part, in
        `calls` collectives. A reduce-scatter takes as long.
        """
        if self.size == 1 or not size:
            return 0.0
        sent = size * (self.size - 1) / self.size
        return calls * self._latency(machine) + sent / self.rate(machine)

    def reduce(self, size: float, machine: Machine) -> float:
        """Return the seconds of an all-reduce."""
        return 2 * self.gather(size, machine)

    def exchange(self, size: float, machine: Machine) -> float:
        """Return the seconds of an all-to-all of `size` bytes per rank, its own part included."""
        if self.size == 1:
            return 0.0
        within = min(self.size, max(1, self.size // self.nodes))
        near = size * (within - 1) / self.size / machine.link_rate
        far = size * (self.size - within) / self.size / machine.network_rate
        return self._latency(machine) + max(near, far)

    def _latency(self, machine: Machine) -> float:
        """Return the latency of a ring: its steps between neighbours, some on other nodes."""
        far = self.nodes - 1
        return (self.size - 1 - far) * machine.link_latency + far * machine.network_latency


OVERLAPPED = 0.85
"""Share of a collective that is hidden behind computation if there is enough of it."""


@dataclass(frozen=True)
class Reductions:
    """Seconds of ZeRO's collectives and copies on one rank, for micro-batches of any size."""

    weights: float
    """Per micro-batch: weights that ZeRO 3 gathers, mostly hidden behind computation."""
    gradients: float
    """Per micro-batch: gradients reduced as they are computed."""
    last: float
    """Per step: gradients reduced at its end."""
    updated: float
    """Per step: weights that ZeRO 1 and 2 gather after the optimizer."""


def exchanges(inputs: Inputs, machine: Machine, again: float) -> dict[str, float]:
    """Return the seconds per micro-batch of the collectives that ZeRO does not affect, on one rank
    of the stage of `inputs`, by key of TERMS.

    `again`: share of the layers whose forward pass is recomputed.
    """
    grid, node = inputs.grid, inputs.gpus_per_node
    sums, heads = traffic.tensor(inputs, again), traffic.sequence(inputs, again)
    tokens = traffic.expert(inputs, again)
    reduce = Group.of(grid.tensor, 1, node).reduce(sums.bytes, machine)
    regroup = Group.of(grid.sequence, grid.tensor, node).exchange(heads.bytes, machine)
    send = Group.of(grid.expert, grid.tensor, node).exchange(tokens.bytes, machine)
    return {
        "tensor": sums.number * reduce,
        "sequence": heads.number * (regroup + 3 * machine.link_latency),
        "expert": tokens.number * send,
        "stages": _stages(inputs, machine),
    }


def reductions(inputs: Inputs, machine: Machine) -> Reductions:
    """Return the reductions of one rank on the stage of `inputs`."""
    zero, weights = inputs.zero, traffic.weights(inputs)
    calls = inputs.shape.num_layers + 2 if zero.stage == 3 else 1
    gather = _over_data_ranks(inputs, weights, machine, calls)
    reduce = _over_data_ranks(inputs, traffic.gradients(inputs), machine, calls)
    last = updated = 0.0
    if zero.stage == 3:
        again = gather
        if zero.secondary_ranks > 1:
            node = Group.of(zero.secondary_ranks, 1, inputs.gpus_per_node)
            again = node.gather(weights.bytes, machine, calls)
        gather += 0.0 if traffic.keeps_weights(inputs) else again
        gather += 2 * calls * machine.gathered_layer_seconds
        reduce += calls * machine.gathered_layer_seconds
    else:  # an all-reduce takes as long as a reduce-scatter and a gather
        gather, updated = 0.0, gather
        reduce, last = (2 * reduce, 0.0) if zero.stage == 2 else (0.0, 2 * reduce)
    shard = inputs.sharded_parameters
    if zero.offload_param != "device":  # a rank's shard comes from its host, forward and backward
        both = shard + inputs.frozen / inputs.shards
        gather += 2 * both * inputs.element_bytes / machine.host_link_rate
    if zero.offload_optimizer != "device":
        reduce += shard * inputs.comm_bytes / machine.host_link_rate
    return Reductions(gather, reduce, last, updated)


def _over_data_ranks(inputs: Inputs, sent: traffic.Calls, machine: Machine, calls: int) -> float:
    """Return the seconds to gather `sent.bytes` once, in `calls` collectives; a reduce-scatter
    takes as long. Experts are exchanged only among the ranks that hold the same ones.
    """
    grid, node = inputs.grid, inputs.gpus_per_node
    every = Group.of(inputs.shards, grid.tensor, node)
    alike = Group.of(inputs.shards // grid.expert, grid.tensor * grid.expert, node)
    seconds = every.gather(sent.bytes - sent.experts, machine, calls)
    return seconds + alike.gather(sent.experts, machine, calls)


def hidden(seconds: float, computation: float) -> float:
    """Return the part of a collective that computation does not hide."""
    return max(seconds - OVERLAPPED * computation, (1 - OVERLAPPED) * seconds)


def _stages(inputs: Inputs, machine: Machine) -> float:
    """Return the seconds per micro-batch in which a middle stage receives and sends hidden states
    and gradients.
    """
    grid = inputs.grid
    if grid.pipeline == 1:
        return 0.0
    apart = grid.world_size // grid.pipeline
    within = apart * 2 <= inputs.gpus_per_node
    size, states = traffic.boundary(inputs).bytes, traffic.hidden_states(inputs)
    rate = machine.link_rate if within else machine.network_rate
    latency = machine.link_latency if within else machine.network_latency
    regather = Group.of(grid.tensor, 1, inputs.gpus_per_node).gather(states, machine)
    return 2 * (latency + size / rate + (regather if inputs.sends_parts else 0.0))
