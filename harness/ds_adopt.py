"""Keys that the run config and the DeepSpeed JSON could both hold.

A literal in the JSON wins over a default of ours and is recorded as an event; it conflicts only
with a value that the user set. "auto" and absent leave the run config's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from harness.assignments import assign, did_you_mean, flat
from harness.config import RunConfig
from harness.config_file import validated
from harness.ds_config import AUTO, Source, literal
from harness.errors import ConfigError
from harness.planning.optimizers import OPTIMIZERS

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# Key of the JSON -> the run config's for the same thing; of two for one, the later wins.
SAME = {
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.betas": "optim.betas",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.momentum": "optim.momentum",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "scheduler.params.warmup_max_lr": "optim.lr",
    "scheduler.params.warmup_num_steps": "optim.warmup_steps",
    "scheduler.params.warmup_type": "optim.warmup_type",
    "scheduler.params.cos_min_ratio": "optim.min_lr_ratio",
    "scheduler.params.total_num_steps": "train.steps",
    "gradient_clipping": "optim.clip_norm",
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
}
# Accepted at the one value that changes nothing.
FIXED: dict[str, Any] = {
    "optimizer.params.amsgrad": False,
    "optimizer.params.bias_correction": True,
    "optimizer.params.maximize": False,
    "optimizer.params.nesterov": False,
    "optimizer.params.dampening": 0,
    "optimizer.params.max_grad_norm": 0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_min_ratio": 0,
}
# How the step is computed, which the engine decides.
IGNORED = tuple(
    f"optimizer.params.{name}"
    for name in ("torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none")
)


def adopt(
    ds: Mapping[str, Any], run: RunConfig, data_ranks: int, source: Source
) -> tuple[RunConfig, list[dict[str, Any]], list[str]]:
    """Put the JSON's optimizer, scheduler, clipping and batch literals into the run config.

    Returns the new run config, an event for each value adopted, and what is wrong.
    """
    problems = _unknown_params(ds, source)
    tree, origins = run.model_dump(exclude_unset=True), run.origins()
    found: dict[str, tuple[str, Any]] = {}
    for json_key, key, value in _shared(ds, run, data_ranks, source, problems):
        found[key] = (json_key, tuple(value) if isinstance(value, list) else value)
    events = []
    for key, (json_key, value) in found.items():
        agree = run.get(key) == value
        if not run.is_set(key):
            assign(tree, key, value)
            origins[key] = f"{source.of(json_key)}: {json_key}"
            if not agree:
                event = {"kind": "adopted", "key": key, "value": value, "json_key": json_key}
                events.append(event)
        elif not agree:
            problems.append(
                f"{key} is {run.get(key)!r} ({run.origin(key)}), but {json_key} is {value!r} "
                f'({source.of(json_key)}): make them agree, or set {json_key} to "auto"'
            )
    try:
        return validated(tree, origins), events, problems
    except ConfigError as error:
        return run, [], problems + error.problems


def _shared(
    ds: Mapping[str, Any], run: RunConfig, data_ranks: int, source: Source, problems: list[str]
) -> Iterator[tuple[str, str, Any]]:
    """(key of the JSON, key of the run config, value) of every literal that has a place there."""
    if kind := literal(ds, "optimizer.type"):
        names = {known.json_type.lower(): n for n, known in reversed(OPTIMIZERS.items())}
        name = names.get(str(kind).lower())
        # DeepSpeed's Adam decouples the decay unless told otherwise (ADAM_W_MODE_DEFAULT).
        if name == "adam" and literal(ds, "optimizer.params.adam_w_mode") is not False:
            name = "adamw"
        # "SGD" is both sgd and momentum.
        if name == "sgd" and run.is_set("optim.name") and run.optim.name == "momentum":
            name = "momentum"
        if name:
            yield "optimizer.type", "optim.name", name
        else:
            types = dict.fromkeys(known.json_type for known in OPTIMIZERS.values())
            problems.append(_not_built("optimizer.type", kind, types, source))
    if kind := literal(ds, "scheduler.type"):
        if kind in SCHEDULES:
            yield "scheduler.type", "optim.schedule", SCHEDULES[kind]
        else:
            problems.append(_not_built("scheduler.type", kind, SCHEDULES, source))
        if kind == "WarmupDecayLR":  # which decays to 0
            yield "scheduler.type", "optim.min_lr_ratio", 0.0
        if literal(ds, "scheduler.params.warmup_type") is None:
            yield "scheduler.type", "optim.warmup_type", "log"  # DeepSpeed's default
    micro = literal(ds, "train_micro_batch_size_per_gpu") or run.train.micro_batch
    accum = literal(ds, "gradient_accumulation_steps")
    if micro and accum and not run.is_set("train.global_batch"):
        product = micro * accum * data_ranks
        yield "gradient_accumulation_steps", "train.global_batch", product
    for json_key, key in SAME.items():
        if (value := literal(ds, json_key)) is not None:
            yield json_key, key, value


def _unknown_params(ds: Mapping[str, Any], source: Source) -> list[str]:
    """What the optimizer and the scheduler cannot take."""
    problems = []
    for section in ("optimizer.params", "scheduler.params"):
        for key, value in flat(literal(ds, section) or {}, f"{section}."):
            where = source.of(key)
            if key in SAME or key in IGNORED or value == AUTO:
                continue
            if key not in FIXED:
                hint = did_you_mean(key, [*SAME, *FIXED])
                problems.append(f"{key} ({where}) is not a parameter known here{hint}")
            elif value != FIXED[key]:
                problems.append(f"{key} is {value!r} ({where}), not built: use {FIXED[key]!r}")
    return problems


def _not_built(key: str, kind: Any, known: Iterable[str], source: Source) -> str:
    return (
        f"{key} is {kind!r} ({source.of(key)}), which is not built here: set it to one of "
        f"{', '.join(known)}, or remove the section and set it in the run config (optim.*)"
    )
