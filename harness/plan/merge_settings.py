"""Merges settings that both the run config and the DeepSpeed JSON can hold.

A literal in the JSON overrides a default of the run config and is recorded as an event. It
conflicts only with a value that the user set. "auto" and absent keys leave the run config's value.
If the JSON names an optimizer or scheduler, keys missing from its section take DeepSpeed's
defaults, unless the user set them in the run config or under another key of the JSON.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.assignments import did_you_mean, flat
from harness.config.ds_check import advice
from harness.config.ds_json import AUTO, DsJson, ds_keys
from harness.config.run_config import RunConfig
from harness.config.run_file import with_values
from harness.errors import ConfigError
from harness.layout.optimizer_table import OPTIMIZERS
from harness.plan.plan import Draft

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SCHEDULES: dict[str, str] = _TABLES["schedules"]
"""optim.schedule for each scheduler of the JSON."""
SAME: dict[str, str] = _TABLES["same"]
"""Run config key for each JSON key with the same meaning; the later of two literals wins."""
_OF_SCHEDULERS: dict[str, list[str]] = _TABLES["parameters"]
FIXED: dict[str, Any] = _TABLES["fixed"]
IGNORED = tuple(f"optimizer.params.{name}" for name in _TABLES["ignored"])
_CLIPS = "optimizer.params.max_grad_norm"


def merge_settings(draft: Draft) -> None:
    """Copy the JSON's optimizer, scheduler, clipping and batch literals into the run config.

    Each value that replaces a default is an event.
    """
    config, ds, problems = draft.config, draft.ds, draft.problems
    _check_params(draft)
    by_key: dict[str, Shared] = {}
    for shared in _shared_values(draft):
        earlier = by_key.get(shared.key)
        if not (earlier and shared.default_of and not earlier.default_of):
            by_key[shared.key] = shared
    events, adopted = [], dict[str, Shared]()
    for key, shared in by_key.items():
        agree = config.get(key) == shared.value
        if not config.is_set(key):
            adopted[key] = shared
            if not agree:
                events.append(shared.event())
        elif not (agree or shared.default_of):
            json_key = shared.json_key
            problems.add(
                key,
                f"but {json_key} is {shared.value!r} ({ds.origin(json_key)})",
                f'make them agree, or set {json_key} to "auto"',
            )
    if _lacks_maximum(ds) and "optim.lr" not in by_key:
        rate = f"{config.optim.lr:g} ({config.origin('optim.lr')})"
        message = f"the peak is optim.lr, {rate}, because optimizer.params.lr is auto"
        events.append({"kind": "adopted", "key": "optim.lr", "message": message})
    try:
        values = {key: shared.value for key, shared in adopted.items()}
        origins = {key: shared.origin(ds) for key, shared in adopted.items()}
        draft.config = with_values(config, values, origins)
        draft.events += events
    except ConfigError as error:
        problems.say(*error.problems)


def _lacks_maximum(ds: DsJson) -> bool:
    """Return True if DeepSpeed's default would be the peak rate of the JSON's schedule."""
    key = "scheduler.params.warmup_max_lr"
    is_open = ds.literal(key) is None and not ds.is_auto(key)
    return is_open and ds.literal("scheduler.type") == "WarmupDecayLR"


@dataclass(frozen=True)
class Shared:
    """The JSON's value for a run config key."""

    json_key: str
    key: str
    value: Any
    default_of: str = ""
    """Optimizer or scheduler type if the value is its default; "" for a literal of the JSON."""

    def origin(self, ds: DsJson) -> str:
        """Return the origin of the value, for messages."""
        if self.default_of:
            return f"{ds.name}: DeepSpeed's default for {self.default_of}"
        return f"{ds.origin(self.json_key)}: {self.json_key}"

    def event(self) -> dict[str, Any]:
        """Return the event which records that the value replaced a default of the run config."""
        event = {"kind": "adopted", "key": self.key, "value": self.value, "json_key": self.json_key}
        if self.default_of:
            event["message"] = (
                f"{self.key} = {self.value!r}, DeepSpeed's default for {self.default_of}: the JSON "
                f"has no {self.json_key}"
            )
        return event


def _shared_values(draft: Draft) -> Iterator[Shared]:
    """Yield every literal and default that has a run config key."""
    ds, config, problems = draft.ds, draft.config, draft.problems
    optimizer = scheduler = None
    if kind := ds.literal("optimizer.type"):
        optimizer = _optimizer_name(kind, ds, config)
        if optimizer:
            yield Shared("optimizer.type", "optim.name", optimizer)
        else:
            types = dict.fromkeys(entry.json_type for entry in OPTIMIZERS.values())
            problems.add("optimizer.type", *_not_built(types))
    if kind := ds.literal("scheduler.type"):
        scheduler = SCHEDULES.get(kind)
        if scheduler:
            yield Shared("scheduler.type", "optim.schedule", scheduler)
        else:
            why, use = _not_built(SCHEDULES)
            is_search = kind == "LRRangeTest"
            use += "; tools/find_lr.py searches for a learning rate" * is_search
            problems.add("scheduler.type", why, use)
        if kind == "WarmupDecayLR":  # it decays to 0
            yield Shared("scheduler.type", "optim.min_lr_ratio", 0.0)
    micro = ds.literal("train_micro_batch_size_per_gpu") or config.train.micro_batch
    accum = ds.literal("gradient_accumulation_steps")
    if micro and accum and not config.is_set("train.global_batch"):
        product = micro * accum * draft.grid.data
        yield Shared("gradient_accumulation_steps", "train.global_batch", product)
    if config.is_set("optim.name") and config.optim.name != optimizer:  # already reported
        optimizer = None
    defaults = {**_optimizer_defaults(ds, optimizer), **_scheduler_defaults(ds, scheduler)}
    if config.is_set("optim.warmup_ratio"):  # another way to set the same
        defaults.pop("scheduler.params.warmup_num_steps", None)
    for json_key, key in SAME.items():
        value = ds.literal(json_key)
        kind = ""
        if value is None and json_key in defaults:
            kind, value = ds.literal(json_key.partition(".")[0] + ".type"), defaults[json_key]
        if value is not None:
            yield Shared(json_key, key, tuple(value) if isinstance(value, list) else value, kind)


def _optimizer_name(kind: Any, ds: DsJson, config: RunConfig) -> str | None:
    """Return optim.name for an optimizer type of the JSON; None for an unsupported type."""
    names = {entry.json_type.lower(): name for name, entry in reversed(OPTIMIZERS.items())}
    name = names.get(str(kind).lower())
    # DeepSpeed's Adam decouples the decay unless told otherwise (ADAM_W_MODE_DEFAULT).
    if name == "adam" and ds.literal("optimizer.params.adam_w_mode") is not False:
        return "adamw"
    # "SGD" is both sgd and momentum.
    if name == "sgd" and config.is_set("optim.name") and config.optim.name == "momentum":
        return "momentum"
    return name


def _optimizer_defaults(ds: DsJson, name: str | None) -> dict[str, Any]:
    """Return DeepSpeed's defaults for parameters missing from the JSON's optimizer."""
    if name is None:
        return {}
    json_type = OPTIMIZERS[name].json_type.lower()
    if ds.literal("optimizer.params.torch_adam"):
        json_type += ", torch_adam"
    defaults = {**ds_keys()["defaults"]["optimizer"].get(json_type, {})}
    if name == "momentum":  # the user's choice; SGD's default of 0 would make it another optimizer
        defaults.pop("momentum", None)
    return _absent(ds, "optimizer", defaults)


def _scheduler_defaults(ds: DsJson, schedule: str | None) -> dict[str, Any]:
    if schedule is None:
        return {}
    defaults = {**ds_keys()["defaults"]["scheduler"][ds.literal("scheduler.type")]}
    if ds.is_auto("optimizer.params.lr"):  # then the run config determines the rate
        defaults.pop("warmup_max_lr", None)
    return _absent(ds, "scheduler", defaults)


def _absent(ds: DsJson, section: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, by dotted key, of parameters that a section does not set."""
    if ds.is_auto(f"{section}.params"):
        return {}
    params = ds.literal(f"{section}.params") or {}
    return {f"{section}.params.{n}": value for n, value in defaults.items() if n not in params}


def _check_params(draft: Draft) -> None:
    """Reject unsupported parameters of supported types of optimizer and scheduler."""
    ds, problems = draft.ds, draft.problems
    built = {entry.json_type.lower() for entry in OPTIMIZERS.values()} | {AUTO}
    types = {"optimizer": built, "scheduler": {kind.lower() for kind in SCHEDULES} | {AUTO}}
    for noun, names in types.items():
        if str(ds.literal(f"{noun}.type") or AUTO).lower() not in names:
            continue
        section = f"{noun}.params"
        for key, value in flat(ds.literal(section) or {}, f"{section}."):
            if value == AUTO:
                continue
            if takers := _other_schedulers(ds, key):
                kind = ds.literal("scheduler.type")
                use = f"remove it, or set scheduler.type to {' or '.join(takers)}"
                problems.add(key, f"which is not a parameter of {kind}", use)
            if takers or key in SAME or key in IGNORED:
                continue
            if key not in FIXED:
                hint = advice(key) or did_you_mean(key, [*SAME, *FIXED])
                problems.say(f"{key} ({ds.origin(key)}) is not a known parameter{hint}")
            elif value != FIXED[key]:
                problems.add(key, "which is not supported", _instead(ds, key, value))


def _instead(ds: DsJson, key: str, value: Any) -> str:
    """Return what to write in place of an unsupported value of FIXED."""
    if key != _CLIPS:
        return f"use {FIXED[key]!r}"
    if ds.literal("gradient_clipping") is not None:
        return "remove it: gradient_clipping is the gradient norm at which this run clips"
    return f"remove it, and set ds.gradient_clipping={value}, which clips the gradient norm"


def _other_schedulers(ds: DsJson, key: str) -> list[str]:
    """Return the schedulers that accept a parameter which the JSON's scheduler does not."""
    section, _, name = key.rpartition(".")
    own = _OF_SCHEDULERS.get(ds.literal("scheduler.type"))
    if section != "scheduler.params" or own is None or name in own:
        return []
    return [kind for kind, names in _OF_SCHEDULERS.items() if name in names]


def _not_built(types: Iterable[str]) -> tuple[str, str]:
    """Return the reason for rejecting a type, and its replacement."""
    return (
        "which is not supported",
        f"set it to one of {', '.join(types)}, or remove the section and set it in the run config "
        "(optim.*)",
    )
