"""Checks of a plan's optimizer: its layouts, settings and parameter groups."""

import importlib.util
import re

from harness.config.ds_json import DsJson, offloaded_to
from harness.config.optim_and_schedule import DECAYS
from harness.layout.optimizer_table import OPTIMIZERS, is_frozen
from harness.plan.plan import Draft

_SETTINGS = ("betas", "eps", "momentum")
_HALF_STATES = (
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.fp16_master_weights_and_grads",
)
_STAGE = "zero_optimization.stage"
_OFFLOAD = "zero_optimization.offload_optimizer"


def check_optimizer(draft: Draft) -> None:
    """Reject settings and layouts that the optimizer or the schedule does not support."""
    config, problems = draft.config, draft.problems
    name = config.optim.name
    kind = OPTIMIZERS[name]
    for setting in _SETTINGS:
        if setting not in kind.takes and config.is_set(f"optim.{setting}"):
            problems.add(f"optim.{setting}", f"which {name} does not take", "remove it")
    for schedule, decay in DECAYS.items():
        for setting in decay.settings:
            if config.optim.schedule != schedule and config.is_set(f"optim.{setting}"):
                why = f"which is for optim.schedule={schedule}"
                problems.add(f"optim.{setting}", why, "remove it")
    if kind.package and not importlib.util.find_spec(kind.package):
        why = f"it needs the package {kind.package} (pip install {kind.package})"
        problems.add("optim.name", why)
    if draft.ds.value("fp16.enabled") and config.optim.clip_value is not None:
        why = "which hides overflows from fp16's loss scaling"
        problems.add("optim.clip_value", why, "set optim.clip_norm instead")
    _check_layout(draft)


def _check_layout(draft: Draft) -> None:
    config, ds, problems = draft.config, draft.ds, draft.problems
    kind, device = OPTIMIZERS[config.optim.name], offloaded_to(ds.tree, "optimizer")
    offload = f"{_OFFLOAD} ({ds.origin(f'{_OFFLOAD}.device')})"
    if kind.layouts == "whole" and ds.value(_STAGE) != 0:
        problems.add(
            "optim.name",
            f"it uses whole matrices, but {_stage_of(ds)} gives it flat shards",
            f"use {_whole_in(ds)}, or optim.name=adam8bit for small states, or optim.name=adamw",
        )
    if kind.layouts == "unoffloaded" and device != "none":
        why = f"its states must stay on the GPU, but {offload} moves them"
        problems.add("optim.name", why, f"remove {_OFFLOAD}, or use optim.name=adamw")
    if device == "nvme" and config.optim.clip_value is not None:
        why = "gradients on NVMe cannot be clipped by value"
        problems.add(
            "optim.clip_value", why, f"set optim.clip_norm instead, or {_OFFLOAD}.device=cpu"
        )
    # Without momentum, sgd has no states that could be misplaced or have the wrong type.
    if kind.by_deepspeed or (config.optim.name == "sgd" and not config.optim.momentum):
        return
    if device == "nvme":
        why = f"only adamw and adam support NVMe, which {offload} selects"
        problems.add("optim.name", why, f"use optim.name=adamw, or {_OFFLOAD}.device=cpu")
    for key in _HALF_STATES:
        if ds.value(key):
            why = f"only adamw and adam support {key} ({ds.origin(key)})"
            problems.add("optim.name", why, f"remove {key}, or use optim.name=adamw")


def _stage_of(ds: DsJson) -> str:
    """Return the ZeRO stage with its origin; if the plan changed it, also the stage in the JSON."""
    stage, origin = ds.value(_STAGE), ds.origin(_STAGE)
    for event in ds.events:
        if event.get("json_key") == _STAGE:
            return f"stage {event['was']} ({origin}), which runs as ZeRO {stage} in half precision,"
    return f"ZeRO {stage} ({origin})"


def _whole_in(ds: DsJson) -> str:
    """Return the settings for ZeRO 0 in fp32 that the JSON lacks."""
    is_given = any(event.get("json_key") == _STAGE and event["was"] == 0 for event in ds.events)
    stage = [] if is_given else [f"{_STAGE}=0"]
    halves = [f"{kind}.enabled" for kind in ("bf16", "fp16") if ds.value(f"{kind}.enabled")]
    return " and ".join([*stage, *(f"{key}=false" for key in halves)])


def note_learning_rate(draft: Draft) -> None:
    """Note that optim.lr is another optimizer's default."""
    optim = draft.config.optim
    if optim.name == "lion" and not draft.config.is_set("optim.lr"):
        draft.note(
            "learning_rate",
            f"optim.lr is {optim.lr:g}, adamw's default: for lion use a third to a tenth of that",
        )


def note_pinned_memory(draft: Draft) -> None:
    """Note that torch rounds the pinned memory of an offload up to powers of two."""
    sections = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
    value, world = draft.ds.value, draft.world
    pins = any(value(f"{s}.device") != "none" and value(f"{s}.pin_memory") for s in sections)
    if not (world.rounds_pinned and (pins or draft.config.model.activation_offload)):
        return
    why = f"torch {world.torch} cannot turn this off, torch 2.13 can"
    if world.has_torch(2, 13):
        why = f"{world.allocators} is unchanged: add pinned_max_cached_size_mb:64"
    draft.note(
        "pinned_memory",
        f"torch rounds pinned host memory up to powers of two, which the estimate includes; {why}",
    )


def check_groups(draft: Draft) -> None:
    """Reject rules of optim.groups that match no parameter and are probably misspelt."""
    assert draft.shape is not None
    names = [tensor.name for tensor in draft.shape.tensors()]
    origin = draft.config.origin("optim.groups")
    for rule in draft.config.optim.groups:
        if not any(re.search(rule.pattern, name) for name in names):
            draft.problems.say(
                f"optim.groups has the pattern {rule.pattern!r} ({origin}), which matches no "
                f"parameter: examples of names are {names[0]} and {names[-1]}"
            )
    if all(is_frozen(name, draft.config.optim.groups) for name in names):
        why = "which freezes every parameter"
        draft.problems.add("optim.groups", why, "leave some trainable")
