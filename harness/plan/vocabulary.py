"""A vocabulary that tensor-parallel ranks cannot divide, in a plan: what it costs."""

from __future__ import annotations

from dataclasses import replace

from harness.estimate.timeline import estimate_memory
from harness.estimate.units import GIB
from harness.layout.division import divides_vocabulary, tensor_shard
from harness.layout.shape import Shape, num_parameters
from harness.plan.plan import Plan
from harness.plan.tensor import padded, whole_vocabulary


def note_whole_vocabulary(plan: Plan) -> Plan:
    """Return the plan with an event if embedding, head and logits stay whole on every rank."""
    shape, estimate, places = plan.shape, plan.estimate, plan.grid.tensor
    if shape is None or estimate is None or places == 1 or divides_vocabulary(shape, places):
        return plan
    config = {**plan.model_config, "vocab_size": padded(shape.vocab_size, places)}
    divided = replace(estimate.inputs, shape=Shape.from_hf(config))
    peak = estimate.worst.peak - estimate_memory(divided, estimate.device_bytes).worst.peak
    more = num_parameters(tensor_shard(shape, places)) - num_parameters(
        tensor_shard(divided.shape, places)
    )
    message = (
        f"{whole_vocabulary(shape, places)}: every rank has all of embedding, head and logits, "
        f"{more:,} parameters more than if it could, and a peak that is {peak:,} bytes "
        f"({peak / GIB:.2f} GiB) higher"
    )
    event = {"kind": "whole_vocabulary", "message": message, "bytes": peak}
    return replace(plan, events=(*plan.events, event))
