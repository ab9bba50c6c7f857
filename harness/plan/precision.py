"""The precision that a run computes in."""

from __future__ import annotations

from harness.estimate.hardware import known_gpu
from harness.layout.world import World, cpu_has_bf16
from harness.plan.draft import Draft

# Master weights, and Adam's moments, in bf16.
HALF_STATES = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")


def decide_precision(draft: Draft) -> None:
    """Decide fp16.enabled and bf16.enabled.

    "auto" means bf16 if the device has it, otherwise fp32 (an event); fp16 is never automatic.
    """
    ds, world, problems = draft.ds, draft.world, draft.problems
    has_bf16, device = device_has_bf16(world), world.gpu or "this CPU"
    if ds.is_auto("fp16.enabled"):
        ds.fill("fp16.enabled", False)
    if ds.is_auto("bf16.enabled"):
        fast = has_bf16 if world.accelerator == "cuda" else cpu_has_bf16()
        ds.fill("bf16.enabled", fast and not ds.value("fp16.enabled"))
        if not fast:
            for key in HALF_STATES:
                ds.remove(key, "left out: DeepSpeed would keep bf16 masters of fp32 weights")
            draft.note("fallback", f"fp32, since {device} has no bfloat16 arithmetic")
    fp16, bf16 = ds.value("fp16.enabled"), ds.value("bf16.enabled")
    if fp16 and bf16:
        problems.say(
            f"fp16.enabled ({ds.origin('fp16.enabled')}) and bf16.enabled "
            f"({ds.origin('bf16.enabled')}) are both true: set one of them to false"
        )
    elif bf16 and not has_bf16:
        why = f"but {device} has no bfloat16"
        problems.add("bf16.enabled", why, 'use ds_configs/fp16.json, or "auto" for fp32 there')
    draft.precision = "fp16" if fp16 else "bf16" if bf16 else "fp32"


def device_has_bf16(world: World) -> bool:
    """Return True if bf16 runs on this rank's device at all; an unknown GPU counts as able to."""
    gpu = known_gpu(world.gpu)
    return gpu is None or gpu.bf16_tflops is not None
