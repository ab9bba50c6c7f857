"""The DeepSpeed JSON made whole: no "auto" left, batch and optimizer filled in, precision decided.

What comes out is handed unchanged to zero.Init and to deepspeed.initialize.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, Literal

from harness.config.assignments import assign, flat
from harness.config.ds_json import AUTO, Source, ds_keys, literal, offloaded_to, value_of
from harness.config.lr_and_batch import Batch
from harness.config.run_config import RunConfig
from harness.estimate.hardware import known_gpu
from harness.layout.grid import Grid
from harness.layout.optimizers import OPTIMIZERS
from harness.layout.world import World, cpu_has_bf16

Precision = Literal["fp32", "bf16", "fp16"]

# Master weights, and Adam's moments, in bf16.
HALF_STATES = ("bf16_master_weights_and_grads", "bf16_optimizer_states")

# DeepSpeed prints a line of its own every so many steps, and divides by it: 0 crashes at step 1.
NEVER_PRINT_STEPS = 2**31 - 1


def resolve_precision(
    ds: dict[str, Any], world: World, source: Source
) -> tuple[Precision, list[dict[str, Any]], list[str]]:
    """Decide fp16.enabled and bf16.enabled in place; returns the precision, events and problems.

    "auto" means bf16 where the device has it, else fp32 with an event; fp16 is never automatic.
    """
    events, problems = [], []
    has_bf16, device = device_has_bf16(world), world.gpu or "this CPU"
    if ds.get("fp16", {}).get("enabled") == AUTO:
        ds["fp16"]["enabled"] = False
    if ds.get("bf16", {}).get("enabled") == AUTO:
        fast = has_bf16 if world.accelerator == "cuda" else cpu_has_bf16()
        ds["bf16"]["enabled"] = fast and not value_of(ds, "fp16.enabled")
        if not fast:
            for key in HALF_STATES:  # DeepSpeed would keep bf16 masters of fp32 weights
                ds["bf16"].pop(key, None)
            message = f"fp32, since {device} has no bfloat16 arithmetic"
            events.append({"kind": "fallback", "message": message})
    fp16, bf16 = value_of(ds, "fp16.enabled"), value_of(ds, "bf16.enabled")
    if fp16 and bf16:
        problems.append(
            f"fp16.enabled ({source.of('fp16.enabled')}) and bf16.enabled "
            f"({source.of('bf16.enabled')}) are both true: set one of them to false"
        )
    elif bf16 and not has_bf16:
        problems.append(
            f"bf16.enabled is true ({source.of('bf16.enabled')}), but {device} has no "
            f'bfloat16: use ds_configs/fp16.json, or "auto" for fp32 there'
        )
    return "fp16" if fp16 else "bf16" if bf16 else "fp32", events, problems


def fill_in_swap_folder(ds: dict[str, Any]) -> None:
    """Where "auto" puts what is offloaded to NVMe, in place: with the temporary files (TMPDIR)."""
    section = literal(ds, "zero_optimization.offload_optimizer")
    if isinstance(section, dict) and section.get("nvme_path") == AUTO:
        section["nvme_path"] = tempfile.gettempdir()


def secondary_problems(ds: Mapping[str, Any], world: World, source: Source) -> list[str]:
    """Whether the ranks can share a second copy of the weights as zero_hpz_partition_size says."""
    key = "zero_optimization.zero_hpz_partition_size"
    size = min(value_of(ds, key), world.world_size)
    if size >= 1 and world.world_size % size == 0:
        return []
    return [
        f"{key} is {value_of(ds, key)} ({source.of(key)}), over which {world.world_size} ranks do "
        f'not divide: use "auto" for the {world.local_world_size} ranks of a node'
    ]


def device_has_bf16(world: World) -> bool:
    """Whether bf16 runs on this rank's device at all; a GPU we do not know is taken to."""
    gpu = known_gpu(world.gpu)
    return gpu is None or gpu.bf16_tflops is not None


def fill_in(
    ds: dict[str, Any],
    run: RunConfig,
    batch: Batch,
    world: World,
    grid: Grid,
    hidden_size: int | None,
) -> None:
    """Write what the run config owns into the JSON and replace what is still "auto", in place.

    Three sizes follow the model as in the Hugging Face Trainer (transformers/integrations/
    deepspeed.py): hidden^2, 0.9 hidden^2 and 10 hidden elements. zero_hpz_partition_size is the
    ranks of a node. Any other "auto" is DeepSpeed's default, unless "auto" is that default itself.
    """
    ds["train_micro_batch_size_per_gpu"] = batch.micro_batch
    ds["gradient_accumulation_steps"] = batch.grad_accum
    ds["train_batch_size"] = batch.global_batch
    if grid.tensor > 1:
        # Under AutoTP DeepSpeed multiplies by every rank; from the other two it takes no harm.
        del ds["train_batch_size"]
    clips_by_value = run.optim.clip_value is not None  # which the engine does
    ds["gradient_clipping"] = 0.0 if clips_by_value else run.optim.clip_norm
    ds["optimizer"] = optimizer_section(run)
    if not OPTIMIZERS[run.optim.name].by_deepspeed:
        ds["zero_allow_untested_optimizer"] = True
        ds["zero_force_ds_cpu_optimizer"] = False
    elif world.accelerator == "cpu" and offloaded_to(ds, "optimizer") == "none":
        ds["optimizer"]["params"]["torch_adam"] = True  # the same, without a minute's compilation
    ds.pop("scheduler", None)  # the loop sets the learning rate of every step itself
    ds["steps_per_print"] = literal(ds, "steps_per_print") or NEVER_PRINT_STEPS
    if literal(ds, "timers.throughput.enabled") is None:
        # It waits for the device twice in every micro-batch, for numbers that nobody reads.
        assign(ds, "timers.throughput.enabled", False)
    zero = ds.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    if hidden_size is not None:
        sizes = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        zero |= {key: size for key, size in sizes.items() if zero.get(key) == AUTO}
    if zero.get("zero_hpz_partition_size") == AUTO and zero["stage"] == 3:
        zero["zero_hpz_partition_size"] = world.local_world_size
    _drop_auto(ds, ds_keys())


def _drop_auto(values: dict[str, Any], section: Mapping[str, Any]) -> None:
    for name, value in list(values.items()):
        node = section.get("keys", {}).get(name, {})
        if value == AUTO and node.get("default") != AUTO:
            del values[name]
        elif isinstance(value, dict):
            _drop_auto(value, node)


def optimizer_section(run: RunConfig) -> dict[str, Any]:
    """The run config's optimizer as a DeepSpeed JSON has it."""
    optim, kind = run.optim, OPTIMIZERS[run.optim.name]
    params: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    values = {"betas": list(optim.betas), "eps": optim.eps, "momentum": optim.momentum_used}
    params |= {key: value for key, value in values.items() if key in kind.takes}
    if optim.name == "adam":
        params["adam_w_mode"] = False  # DeepSpeed's Adam decouples the decay unless told not to
    return {"type": kind.json_type, "params": params}


def overrides(given: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An event for each literal of the (normalized) JSON that did not survive as it was."""
    after = dict(flat(resolved))
    return [
        {"kind": "override", "json_key": key, "was": value, "value": after.get(key)}
        for key, value in flat(given)
        if value not in (AUTO, None)
        and after.get(key) != value
        and not key.startswith("scheduler.")
    ]
