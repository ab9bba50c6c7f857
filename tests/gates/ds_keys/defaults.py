"""DeepSpeed's defaults of parameters that an optimizer or a scheduler section lacks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

# The classes that DeepSpeed makes of an optimizer's type, whose defaults agree.
_OPTIMIZERS: dict[str, tuple[type, ...]] = {
    "adamw": (FusedAdam, DeepSpeedCPUAdam),
    "adam": (FusedAdam, DeepSpeedCPUAdam),
    "adamw, torch_adam": (torch.optim.AdamW,),
    "adam, torch_adam": (torch.optim.Adam,),
    "lion": (FusedLion, DeepSpeedCPULion),
    "adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    "sgd": (torch.optim.SGD,),
    "adafactor": (torch.optim.Adafactor,),
}
# MuonWithAuxAdam's, but for its two learning rates: optim.lr is another measure.
_MUON = {"momentum": 0.95, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0}
_SCHEDULERS = (WarmupLR, WarmupDecayLR, WarmupCosineLR)
_LEARNED = ("lr", "betas", "eps", "momentum", "weight_decay")
_SCHEDULED = ("warmup_max_lr", "warmup_num_steps", "warmup_type", "cos_min_ratio")


def optimizer_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of the optimizers' classes, by DeepSpeed's name in lower case."""
    defaults = {}
    for name, classes in _OPTIMIZERS.items():
        first, *others = [_defaults(kind, _LEARNED) for kind in classes]
        assert all(first == defaults_ for defaults_ in others), f"{name}: {first}, {others}"
        defaults[name] = {key: value for key, value in first.items() if key in _taken(name)}
    return {**defaults, "muon": _MUON}


def _taken(name: str) -> tuple[str, ...]:
    """Adafactor's eps is another thing: two numbers."""
    return tuple(key for key in _LEARNED if (name, key) != ("adafactor", "eps"))


def scheduler_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of the schedulers' classes, by their names."""
    return {kind.__name__: _defaults(kind, _SCHEDULED) for kind in _SCHEDULERS}


def _defaults(kind: type, names: tuple[str, ...]) -> dict[str, Any]:
    """The defaults of a class's arguments among `names`, without those that are None."""
    arguments = inspect.signature(kind).parameters
    values = {name: arguments[name].default for name in names if name in arguments}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    return {name: value for name, value in plain.items() if value is not None}
