"""Bytes that a rank passes to the collectives of a step, by parallelism axis.

For a sum, gather or scatter this is the whole tensor; for an all-to-all everything the rank sends,
including its own part. A ring of n ranks then sends (n - 1) / n of it, and twice that for a sum
(step_time/exchanges.py). Sums of single numbers, such as norms, are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.estimate.inputs import Inputs
from harness.estimate.partition import is_of_experts
from harness.layout.expert import EXPERTS
from harness.layout.shape import Shape, Tensor

KEPT_ELEMENTS = 5e8
"""ZeRO 3 keeps a model of up to this many elements between forward and backward pass
(stage3_max_reuse_distance counts both passes)."""


@dataclass(frozen=True)
class Calls:
    """Collectives per micro-batch or per step."""

    number: float
    bytes: float
    """Bytes per call."""
    experts: float = 0.0
    """Bytes among these that only ranks with the same experts exchange."""

    @property
    def total(self) -> float:
        """Bytes of all calls."""
        return self.number * self.bytes


def tensor(inputs: Inputs, again: float = 0.0) -> Calls:
    """Return a micro-batch's sums of hidden states over tensor-parallel ranks: two in each layer's
    forward pass and two in its backward pass (arXiv 1909.08053, section 3), one for the embedding
    and one before the head. If residuals are divided, each is a reduce-scatter and a gather; two
    gathers in each layer repeat those of the forward pass, and two are at the ends of the layers.
    `again`: share of the layers whose forward pass is recomputed.
    """
    if inputs.grid.tensor == 1:
        return Calls(0, 0)
    more = int(inputs.divides_residuals)
    ends = (inputs.stage in (None, 0)) + inputs.has_head + more
    return Calls(inputs.shape.num_layers * (4 + more + 2 * again) + ends, hidden_states(inputs))


def sequence(inputs: Inputs, again: float = 0.0) -> Calls:
    """Return a micro-batch's all-to-alls between rows and heads, for queries, keys, values and
    results (arXiv 2309.14509); four of them count as one call.
    """
    shape, ranks = inputs.shape, inputs.grid.sequence
    if ranks == 1:
        return Calls(0, 0)
    width = 2 * shape.q_size + 2 * max(shape.kv_size, shape.head_dim * ranks)
    return Calls(shape.num_layers * (2 + again), inputs.tokens * width * inputs.element_bytes)


def expert(inputs: Inputs, again: float = 0.0) -> Calls:
    """Return a micro-batch's all-to-alls of tokens to their experts and back, forward and backward;
    a mean over ranks, which receive different numbers of tokens.
    """
    if inputs.grid.expert == 1:
        return Calls(0, 0)
    sent = hidden_states(inputs) * inputs.shape.experts_per_token
    return Calls(_sparse_layers(inputs.shape) * (4 + 2 * again), sent)


def boundary(inputs: Inputs) -> Calls:
    """Return what a micro-batch sends across one stage boundary, in one direction."""
    grid = inputs.grid
    parts = grid.tensor if inputs.sends_parts else 1
    return Calls(grid.pipeline > 1, hidden_states(inputs) / parts)


def gradients(inputs: Inputs) -> Calls:
    """Return a step's reductions of gradients over data ranks; each is of all the rank's gradients.

    ZeRO 0 and 1 all-reduce them once and ZeRO 2 in every micro-batch
    (use_multi_rank_bucket_allreduce); ZeRO 3 reduce-scatters them in every micro-batch.
    """
    times = inputs.grad_accum if inputs.zero.stage >= 2 else 1
    return _shared(inputs, times, inputs.trained_tensors, inputs.comm_bytes)


def weights(inputs: Inputs) -> Calls:
    """Return a step's gathers of weights over data ranks; each is of all weights that the rank
    computes with. ZeRO 1 and 2 gather once, after the optimizer; ZeRO 3 for the forward pass of
    every micro-batch, and for its backward pass unless it keeps the weights.
    """
    stage = inputs.zero.stage
    if stage == 0:
        return Calls(0, 0)
    if stage < 3:
        return _shared(inputs, 1, inputs.trained_tensors, inputs.element_bytes)
    times = inputs.grad_accum * (1 if keeps_weights(inputs) else 2)
    every = [*inputs.trained_tensors, *inputs.frozen_tensors]
    return _shared(inputs, times, every, inputs.element_bytes)


def keeps_weights(inputs: Inputs) -> bool:
    """Return True if ZeRO 3 keeps what it gathered for the forward pass."""
    return inputs.parameters <= min(KEPT_ELEMENTS, inputs.zero.max_reuse_distance / 2)


def hidden_states(inputs: Inputs) -> float:
    """Return the bytes of a micro-batch's hidden states on one rank."""
    return float(inputs.tokens * inputs.shape.hidden_size * inputs.element_bytes)


def _shared(inputs: Inputs, times: int, tensors: Sequence[Tensor], element_bytes: int) -> Calls:
    """Return collectives of the tensors that several data ranks replicate or shard."""
    shared = [tensor for tensor in tensors if inputs.shards_of([tensor]) > 1]
    of_experts = [t for t in shared if inputs.grid.expert > 1 and is_of_experts([t])]
    sizes = (element_bytes * sum(t.numel for t in some) for some in (shared, of_experts))
    return Calls(times, *sizes)


@lru_cache(maxsize=256)
def _sparse_layers(shape: Shape) -> int:
    return sum(any(t.kind == EXPERTS for t in layer) for layer in shape.body.layers)
