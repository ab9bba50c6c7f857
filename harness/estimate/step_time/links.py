"""Seconds of collectives over a group of ranks: a latency for each step, and bytes over a rate.

Rings, as NCCL's: each rank sends (n - 1) / n of the whole once for an all-gather or a
reduce-scatter, and twice for an all-reduce (Patarasuk and Yuan, 2009). Between nodes a ring enters
and leaves each node once, and all of a node's network cards carry it.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.estimate.step_time.machine import Machine


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, and how they lie on nodes."""

    size: int
    nodes: int
    """Nodes that the group spans."""
    sharing: int
    """Groups of the same kind on a node, which share its network."""

    @classmethod
    def of(cls, size: int, stride: int, gpus_per_node: int) -> Group:
        """Return the group of `size` ranks that are `stride` ranks apart."""
        span = size * stride
        if span <= gpus_per_node:
            return cls(size, 1, 1)
        nodes = min(size, -(-span // gpus_per_node))
        return cls(size, nodes, max(1, min(stride, gpus_per_node)))

    def rate(self, machine: Machine) -> float:
        """Bytes a second that pass each point of the group's ring."""
        if self.nodes == 1:
            return machine.link_rate
        node = machine.network_rate * machine.gpus_per_node / self.sharing
        return min(machine.link_rate, node) if self.size > self.nodes else node

    def gather(self, size: float, machine: Machine, calls: int = 1) -> float:
        """Seconds in which every rank gets a whole of `size` bytes, of which each had a part, in
        so many collectives; as long as a reduce-scatter of so many.
        """
        if self.size == 1:
            return 0.0
        sent = size * (self.size - 1) / self.size
        return calls * self._latency(machine) + sent / self.rate(machine)

    def reduce(self, size: float, machine: Machine) -> float:
        """Seconds of an all-reduce."""
        return 2 * self.gather(size, machine)

    def exchange(self, size: float, machine: Machine) -> float:
        """Seconds of an all-to-all of which each rank sends `size` bytes, its own part included."""
        if self.size == 1:
            return 0.0
        within = min(self.size, max(1, self.size // self.nodes))
        near = size * (within - 1) / self.size / machine.link_rate
        far = size * (self.size - within) / self.size / machine.network_rate
        return self._latency(machine) + max(near, far)

    def _latency(self, machine: Machine) -> float:
        """A ring's: each of its steps between neighbours, of which some are on other nodes."""
        far = self.nodes - 1
        return (self.size - 1 - far) * machine.link_latency + far * machine.network_latency
