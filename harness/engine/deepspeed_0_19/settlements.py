"""Settlements of what an engine of DeepSpeed leaves open between calls; nothing is replaced here.

tests/engine/deepspeed_0_19/ shows for each that it is still needed: when such a test fails after an
upgrade, the function can go.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def settle_gradients(engine: Any) -> None:
    """Let gradients be read as soon as the last backward pass was launched.

    ZeRO-1 and -2 copy offloaded gradients to the host, and wait for that at the head of `step`
    alone: read before, they may be the last step's; clamped before, the copy overwrites them.
    Those on the device are reduced on another stream, which other DeepSpeeds may not wait for.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_wait_for_offload_copies"):
        optimizer._wait_for_offload_copies()
    for name in ("reduction_stream", "reduce_and_partition_stream"):
        if (stream := getattr(optimizer, name, None)) is not None:
            get_accelerator().current_stream().wait_stream(stream)


def gather_after_writing(engine: Any) -> None:
    """Let ZeRO-3's next gather of weights wait for those being written on the current stream.

    DeepSpeed gathers on a stream of its own, which waits for no step before. If no weight is
    persistent (stage3_param_persistence_threshold 0), nothing but the throughput timer's waits
    keeps the next forward pass from weights that are half old.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())


def drop_skipped_gradients(engine: Any) -> None:
    """Keep a step that was skipped out of the next one's gradients, after it.

    With the optimizer on the CPU and sums in fp32 beside 16-bit weights, ZeRO-2 clears them after
    the steps that it takes alone: after NaN it would skip for ever.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False) and not engine.was_step_applied():
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


def replay_adam_steps(optimizer: Any) -> None:
    """Bring DeepSpeed's Adam on the CPU to where the run was saved, exactly; after a load.

    Its C++ multiplies the powers of beta up step by step, but takes them by `pow` when it meets a
    step that does not follow the last: a resumed run would round differently from then on.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [state for state in inner.state.values() if "step" in state]
    if not states or type(inner).__name__ != "DeepSpeedCPUAdam":
        return  # CUDA's takes them by `pow` always
    value = torch.zeros(1)
    value.grad = torch.zeros(1)
    kept = inner.state, inner.param_groups
    group = {**inner.param_groups[0], "lr": 0.0, "params": [value]}
    group.pop("step", None)
    inner.state, inner.param_groups = defaultdict(dict), [group]
    try:
        for _ in range(max(int(state["step"]) for state in states)):
            inner.step()
    finally:
        inner.state, inner.param_groups = kept


def is_minimum_loss_scale(error: Exception) -> bool:
    """Return True for DeepSpeed's bare Exception on a loss scale that cannot fall further."""
    return type(error) is Exception and "loss scale already at minimum" in str(error)
