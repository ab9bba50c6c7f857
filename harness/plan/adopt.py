"""Keys that the run config and the DeepSpeed JSON could both hold.

A literal in the JSON wins over a default of ours and is recorded as an event; it conflicts only
with a value that the user set. "auto" and absent leave the run config's value. Where the JSON says
which optimizer or scheduler it wants, what its section leaves out is DeepSpeed's default, which
gives way to a value that the user set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.config.assignments import assign, did_you_mean, flat
from harness.config.ds_json import AUTO, Source, ds_keys, literal
from harness.config.run_config import RunConfig
from harness.config.run_file import validated
from harness.errors import ConfigError
from harness.layout.optimizers import OPTIMIZERS

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
    by_key: dict[str, Shared] = {}
    for shared in _shared(ds, run, data_ranks, source, problems):
        by_key[shared.key] = shared
    events = []
    for key, shared in by_key.items():
        agree = run.get(key) == shared.value
        if not run.is_set(key):
            assign(tree, key, shared.value)
            origins[key] = shared.origin(source)
            if not agree:
                events.append(shared.event())
        elif not (agree or shared.default_of):
            json_key, where = shared.json_key, source.of(shared.json_key)
            problems.append(
                f"{key} is {run.get(key)!r} ({run.origin(key)}), but {json_key} is "
                f'{shared.value!r} ({where}): make them agree, or set {json_key} to "auto"'
            )
    try:
        return validated(tree, origins), events, problems
    except ConfigError as error:
        return run, [], problems + error.problems


@dataclass(frozen=True)
class Shared:
    """What the JSON says of a key of the run config."""

    json_key: str
    key: str
    value: Any
    default_of: str = ""
    """The type of the optimizer or scheduler whose default it is; empty for the JSON's literal."""

    def origin(self, source: Source) -> str:
        """Where the value came from, for messages."""
        if self.default_of:
            return f"{source.name}: DeepSpeed's default for {self.default_of}"
        return f"{source.of(self.json_key)}: {self.json_key}"

    def event(self) -> dict[str, Any]:
        """That it took the place of a default of ours."""
        event = {"kind": "adopted", "key": self.key, "value": self.value, "json_key": self.json_key}
        if self.default_of:
            event["message"] = (
                f"{self.key} = {self.value!r}, DeepSpeed's default for {self.default_of}: the JSON "
                f"has no {self.json_key}"
            )
        return event


def _shared(
    ds: Mapping[str, Any], run: RunConfig, data_ranks: int, source: Source, problems: list[str]
) -> Iterator[Shared]:
    """Every literal and default that has a place in the run config; of two for one, the later
    wins.
    """
    optimizer = scheduler = None
    if kind := literal(ds, "optimizer.type"):
        optimizer = _optimizer_name(kind, ds, run)
        if optimizer:
            yield Shared("optimizer.type", "optim.name", optimizer)
        else:
            types = dict.fromkeys(known.json_type for known in OPTIMIZERS.values())
            problems.append(_not_built("optimizer.type", kind, types, source))
    if kind := literal(ds, "scheduler.type"):
        scheduler = SCHEDULES.get(kind)
        if scheduler:
            yield Shared("scheduler.type", "optim.schedule", scheduler)
        else:
            problems.append(_not_built("scheduler.type", kind, SCHEDULES, source))
        if kind == "WarmupDecayLR":  # which decays to 0
            yield Shared("scheduler.type", "optim.min_lr_ratio", 0.0)
    micro = literal(ds, "train_micro_batch_size_per_gpu") or run.train.micro_batch
    accum = literal(ds, "gradient_accumulation_steps")
    if micro and accum and not run.is_set("train.global_batch"):
        product = micro * accum * data_ranks
        yield Shared("gradient_accumulation_steps", "train.global_batch", product)
    defaults = {**_optimizer_defaults(ds, optimizer), **_scheduler_defaults(ds, scheduler)}
    for json_key, key in SAME.items():
        value = literal(ds, json_key)
        kind = ""
        if value is None and json_key in defaults:
            kind, value = literal(ds, json_key.partition(".")[0] + ".type"), defaults[json_key]
        if value is not None:
            yield Shared(json_key, key, tuple(value) if isinstance(value, list) else value, kind)


def _optimizer_name(kind: Any, ds: Mapping[str, Any], run: RunConfig) -> str | None:
    """optim.name for a type of the JSON; None for one that is not built."""
    names = {known.json_type.lower(): n for n, known in reversed(OPTIMIZERS.items())}
    name = names.get(str(kind).lower())
    # DeepSpeed's Adam decouples the decay unless told otherwise (ADAM_W_MODE_DEFAULT).
    if name == "adam" and literal(ds, "optimizer.params.adam_w_mode") is not False:
        return "adamw"
    # "SGD" is both sgd and momentum.
    if name == "sgd" and run.is_set("optim.name") and run.optim.name == "momentum":
        return "momentum"
    return name


def _optimizer_defaults(ds: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """What DeepSpeed takes for the parameters that the JSON's optimizer lacks."""
    if name is None:
        return {}
    json_type = OPTIMIZERS[name].json_type.lower()
    if literal(ds, "optimizer.params.torch_adam"):
        json_type += ", torch_adam"
    defaults = {**ds_keys()["defaults"]["optimizer"].get(json_type, {})}
    if name == "momentum":  # which the user chose: SGD's 0 would be another optimizer
        defaults.pop("momentum", None)
    return _absent(ds, "optimizer", defaults)


def _scheduler_defaults(ds: Mapping[str, Any], schedule: str | None) -> dict[str, Any]:
    if schedule is None:
        return {}
    return _absent(
        ds, "scheduler", ds_keys()["defaults"]["scheduler"][literal(ds, "scheduler.type")]
    )


def _absent(ds: Mapping[str, Any], section: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a section's defaults, by dotted key, of which the section says nothing."""
    params = ds[section].get("params") or {}
    if params == AUTO:
        return {}
    return {f"{section}.params.{n}": value for n, value in defaults.items() if n not in params}


def _unknown_params(ds: Mapping[str, Any], source: Source) -> list[str]:
    """What the optimizer and the scheduler cannot take; nothing of a type that is not built, whose
    parameters are its own.
    """
    problems = []
    built = {known.json_type.lower() for known in OPTIMIZERS.values()} | {"auto"}
    types = {"optimizer": built, "scheduler": {kind.lower() for kind in SCHEDULES} | {"auto"}}
    for noun, names in types.items():
        if str(literal(ds, f"{noun}.type") or AUTO).lower() not in names:
            continue
        section = f"{noun}.params"
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
