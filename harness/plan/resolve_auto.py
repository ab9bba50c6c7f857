"""Completes the DeepSpeed JSON: fills in precision, batch and optimizer, leaves no "auto".

plan/plan.py names what changes the result afterwards.
"""

import tempfile
from typing import Any

from harness.config.assignments import flat
from harness.config.ds_json import AUTO, DsJson, default_of, offloaded_to
from harness.config.run_config import RunConfig
from harness.estimate.hardware import half_precision
from harness.layout.families import given_size
from harness.layout.optimizer_table import OPTIMIZERS
from harness.layout.world import cpu_has_bf16
from harness.plan.plan import Draft

HALVES = ("bf16", "fp16")
# Master weights and Adam's moments in bf16.
HALF_STATES = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")


def decide_precision(draft: Draft) -> None:
    """Decide fp16.enabled and bf16.enabled.

    "auto" in either section means the half precision that the device computes in, unless the other
    section is on: bf16, or fp16 on a GPU without bf16 (an event); on a CPU without bf16, fp32.
    """
    ds, world, problems = draft.ds, draft.world, draft.problems
    half, device = half_precision(world.gpu), world.gpu or "this CPU"
    auto = [f"{name}.enabled" for name in HALVES if ds.is_auto(f"{name}.enabled")]
    if auto:
        chosen = _half_precision(draft)
        if chosen is not None:
            ds.fill(f"{chosen}.enabled", True)
        for key in auto:
            ds.fill(key, key == f"{chosen}.enabled")
    fp16, bf16 = ds.value("fp16.enabled"), ds.value("bf16.enabled")
    if auto and not bf16:
        kept = "masters of fp32 weights" if not fp16 else "masters of fp16 weights"
        for key in HALF_STATES:
            ds.remove(key, f"left out: DeepSpeed would keep bf16 {kept}")
    if fp16 and bf16:
        problems.say(
            f"fp16.enabled ({ds.origin('fp16.enabled')}) and bf16.enabled "
            f"({ds.origin('bf16.enabled')}) are both true: set one of them to false"
        )
    elif bf16 and half != "bf16":
        why = f"but {device} has no bfloat16"
        problems.add("bf16.enabled", why, 'use "auto", which is fp16 there')
    elif half != "bf16" and ds.literal("torch_autocast.enabled"):
        why = f"but {device} has no bfloat16"
        problems.add("torch_autocast.enabled", why, "use fp16.enabled=true instead")
    draft.precision = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    is_unasked = all(ds.literal(f"{name}.enabled") is None for name in (*HALVES, "torch_autocast"))
    if draft.precision == "fp32" and world.accelerator == "cuda" and is_unasked and not auto:
        draft.note("precision", f"fp32, as the JSON names no precision: set ds.{half}.enabled=true")


def _half_precision(draft: Draft) -> str | None:
    """Return "bf16" or "fp16" for "auto"; None if the JSON decides, or for fp32."""
    ds, world = draft.ds, draft.world
    if True in (ds.literal("fp16.enabled"), ds.literal("bf16.enabled")):
        return None
    is_gpu, device = world.accelerator == "cuda", world.gpu or "this CPU"
    fast = half_precision(world.gpu) == "bf16" if is_gpu else cpu_has_bf16()
    if fast and ds.literal("bf16.enabled") is not False:
        return "bf16"
    if not is_gpu or ds.literal("fp16.enabled") is False or ds.literal("torch_autocast.enabled"):
        if not fast:
            draft.note("fallback", f"fp32, because {device} has no bfloat16 arithmetic")
        return None
    if not fast:
        keep = "ds.fp16.enabled=false keeps fp32"
        draft.note("fallback", f"fp16, because {device} has no bfloat16 arithmetic: {keep}")
    if draft.ds.literal("pipeline.stages") not in (None, 0, 1):
        why = "left out: under pipeline stages with fp16 DeepSpeed does not add up gradients in it"
        ds.remove("data_types.grad_accum_dtype", why)
    return "fp16"


# DeepSpeed prints a line every this many steps; 0 would divide by zero at step 1.
NEVER_PRINT_STEPS = 2**31 - 1
_OWNED = "the run config owns it"
_FUSED = ("adamw", "adam", "muon")  # torch has fused kernels for these


def fill_in_swap_folder(draft: Draft) -> None:
    """Set an NVMe folder of "auto" to the folder for temporary files (TMPDIR)."""
    key = "zero_optimization.offload_optimizer.nvme_path"
    if draft.ds.is_auto(key):
        draft.ds.fill(key, tempfile.gettempdir())


def resolve_auto(draft: Draft) -> None:
    """Write the run config's values into the JSON and replace every remaining "auto".

    Three sizes depend on the model as in the Hugging Face Trainer
    (transformers/integrations/deepspeed.py): hidden^2, 0.9 hidden^2 and 10 hidden elements.
    zero_hpz_partition_size is the ranks per node. Other "auto" values become DeepSpeed's default,
    unless that is "auto" too.
    """
    _fill_in_batch(draft)
    _fill_in_optimizer(draft)
    _fill_in_reports(draft.ds)
    _fill_in_zero(draft)
    _drop_auto(draft.ds)


def _fill_in_batch(draft: Draft) -> None:
    ds, batch = draft.ds, draft.batch
    assert batch is not None, "a batch that does not divide is a problem"
    ds.fill("train_micro_batch_size_per_gpu", batch.micro_batch, _OWNED)
    ds.fill("gradient_accumulation_steps", batch.grad_accum, _OWNED)
    # Ranks that share a row count as data ranks for DeepSpeed.
    ds.fill("train_batch_size", batch.global_batch * draft.grid.sequence, _OWNED)


def _fill_in_optimizer(draft: Draft) -> None:
    ds, optim = draft.ds, draft.config.optim
    clips_by_value = optim.clip_value is not None  # done by the engine
    ds.fill("gradient_clipping", 0.0 if clips_by_value else optim.clip_norm, _OWNED)
    section = optimizer_section(draft.config)
    if not OPTIMIZERS[optim.name].by_deepspeed:
        ds.fill("zero_allow_untested_optimizer", True, "the engine brings the optimizer")
        ds.fill("zero_force_ds_cpu_optimizer", False, "the engine brings the optimizer")
    elif offloaded_to(ds.tree, "optimizer") == "none":
        section["params"]["torch_adam"] = True
    if optim.name in _FUSED and _is_fused(draft):
        section["params"]["fused"] = True
    ds.fill("optimizer", section, _OWNED)
    ds.drop("scheduler")  # the loop sets the learning rate of every step itself


def _is_fused(draft: Draft) -> bool:
    """Return True if torch's fused Adam kernel is used: on GPUs, unless the JSON decides.

    It computes the same as DeepSpeed's FusedAdam, which would need a matching nvcc, CUDA headers
    and a compatible compiler on every node. The CPU kernel rounds the last elements of a tensor
    differently, so that results would depend on the layout in the last bit.
    """
    if offloaded_to(draft.ds.tree, "optimizer") != "none":
        return False
    choice = draft.ds.literal("optimizer.params.fused")
    return draft.world.accelerator == "cuda" if choice is None else bool(choice)


def _fill_in_reports(ds: DsJson) -> None:
    if not ds.literal("steps_per_print"):
        ds.fill("steps_per_print", NEVER_PRINT_STEPS, "the loop reports every step")
    if ds.literal("timers.throughput.enabled") is None:
        # It would synchronise twice per micro-batch, for numbers that nobody reads.
        ds.fill("timers.throughput.enabled", False)


def _fill_in_zero(draft: Draft) -> None:
    ds, zero = draft.ds, "zero_optimization"
    ds.fill(f"{zero}.stage", ds.value(f"{zero}.stage"))
    hidden_size = given_size(draft.model_config, "hidden")
    if hidden_size is not None:
        sizes = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        for name, size in sizes.items():
            if ds.is_auto(f"{zero}.{name}"):
                ds.fill(f"{zero}.{name}", size)
    ranks_of_secondary = f"{zero}.zero_hpz_partition_size"
    if ds.is_auto(ranks_of_secondary) and ds.value(f"{zero}.stage") == 3:
        ds.fill(ranks_of_secondary, draft.world.local_world_size)


def _drop_auto(ds: DsJson) -> None:
    for key, value in list(flat(ds.tree)):
        if value == AUTO and default_of(key) != AUTO:
            ds.drop(key)


def optimizer_section(config: RunConfig) -> dict[str, Any]:
    """Return the run config's optimizer as the section of a DeepSpeed JSON."""
    optim, kind = config.optim, OPTIMIZERS[config.optim.name]
    params: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    values = {"betas": list(optim.betas), "eps": optim.eps, "momentum": optim.momentum_used}
    params |= {key: value for key, value in values.items() if key in kind.takes}
    if optim.name == "adam":
        params["adam_w_mode"] = False  # DeepSpeed's Adam decouples the decay unless told not to
    return {"type": kind.json_type, "params": params}
