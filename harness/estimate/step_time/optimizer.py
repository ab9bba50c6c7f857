"""Seconds of the optimizer's step: it moves bytes, and computes next to nothing."""

from __future__ import annotations

from harness.estimate.inputs import Inputs
from harness.estimate.step_time.machine import Machine

_STATES = {"adam": 2, "adamw": 2, "lion": 1, "muon": 1, "sgd": 0, "adafactor": 1}


def optimizer_seconds(inputs: Inputs, machine: Machine) -> float:
    """Return the seconds of the step on one rank, copies between host and GPU included.

    Read and written are the weights in fp32 and each state; read are gradients, written weights.
    """
    zero = inputs.zero
    shards = inputs.shards if zero.stage else 1
    elements = inputs.trained / shards
    states = next((n for name, n in _STATES.items() if name in zero.optimizer), 2)
    width = inputs.element_bytes
    moved = elements * (8 * (1 + states) + 4 + width)
    norm = elements * inputs.sum_bytes / machine.memory_rate
    if zero.offload_optimizer == "device":
        return moved / machine.memory_rate + norm
    copied = elements * (inputs.sum_bytes + width) / machine.host_link_rate
    computed = moved / machine.host_memory_rate
    if zero.offload_optimizer == "nvme":
        computed = max(computed, elements * 8 * (1 + states) / machine.nvme_rate)
    return norm + copied + zero.offload_ratio * computed
