"""The optimizers (settings, state size, possible layouts) and the parameter groups they step.

A ZeRO stage passes flat pieces of weights to an optimizer. Most optimizers treat elements
independently, so this makes no difference; those that use whole matrices must be given them, or the
result would change.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Optimizer:
    """One value of optim.name."""

    json_type: str
    """Its type in a DeepSpeed JSON."""
    takes: tuple[str, ...]
    """Its keys of optim.*, besides lr and weight_decay."""
    state_bytes: float
    """Bytes of state per element, in fp32 unless quantized, without the master weight."""
    momentum: float = 0.0
    """Default value of optim.momentum."""
    by_deepspeed: bool = False
    """True if DeepSpeed builds and compiles it; otherwise engine/optimizers.py does, based on
    torch.
    """
    layouts: str = "any"
    """"any"; "unoffloaded": states must not be on the host; "whole": only ZeRO 0 in fp32."""
    package: str | None = None
    """Required Python package."""


_ADAM = ("betas", "eps")
OPTIMIZERS = {
    "adamw": Optimizer("AdamW", _ADAM, 8, by_deepspeed=True),
    "adam": Optimizer("Adam", _ADAM, 8, by_deepspeed=True),
    "sgd": Optimizer("SGD", ("momentum",), 0),
    "momentum": Optimizer("SGD", ("momentum",), 4, momentum=0.9),
    "adagrad": Optimizer("Adagrad", ("eps",), 4),
    "lion": Optimizer("Lion", ("betas",), 4),
    "muon": Optimizer("Muon", (*_ADAM, "momentum"), 4, momentum=0.95),
    "adafactor": Optimizer("Adafactor", (), 0, layouts="whole"),
    "adam8bit": Optimizer(  # two codes, and two scales per 256 elements
        "AdamW8bit", _ADAM, 2 + 8 / 256, layouts="unoffloaded", package="bitsandbytes"
    ),
}
"""Each is compared with a reference in tests/engine/test_optimizers.py."""


class GroupRule(Protocol):
    """Other settings for the parameters whose names match `pattern`: an entry of optim.groups."""

    @property
    def pattern(self) -> str:
        """Regular expression, searched for in parameter names."""

    @property
    def lr_multiplier(self) -> float:
        """Factor of the learning rate."""

    @property
    def weight_decay(self) -> float | None:
        """Weight decay; None keeps the default."""

    @property
    def frozen(self) -> bool:
        """True if they are not trained."""


@dataclass(frozen=True)
class Group:
    """Settings that the parameters of one optimizer group share."""

    weight_decay: float
    lr_multiplier: float = 1.0
    muon: bool = False
    """True if stepped by Muon: matrices of the layers. The rest of a Muon run uses AdamW."""


@dataclass(frozen=True)
class Parameter:
    """The properties of a parameter that determine its group."""

    name: str
    matrix: bool
    """True if it gets weight decay: a matrix that is not an embedding."""
    head: bool = False


def is_frozen(name: str, rules: Iterable[GroupRule]) -> bool:
    """Return True if the first rule that matches a parameter freezes it."""
    return next((rule.frozen for rule in rules if re.search(rule.pattern, name)), False)


def optimizer_groups(
    parameters: Iterable[Parameter],
    weight_decay: float,
    rules: Iterable[GroupRule] = (),
    muon: bool = False,
    adam_rate: float = 1.0,
) -> list[tuple[Group, list[str]]]:
    """Return groups with the names of their parameters: first matrices, then biases, norms and
    embeddings, then those of the rules. If several rules match a name, the first applies.
    `adam_rate`: factor of the learning rate of what Muon does not update.
    """
    rules = tuple(rules)
    groups: dict[tuple[int, bool, bool], tuple[Group, list[str]]] = {}
    for parameter in parameters:
        matches = (n for n, rule in enumerate(rules) if re.search(rule.pattern, parameter.name))
        place = next(matches, -1)
        rule = rules[place] if place >= 0 else None
        decay = weight_decay if parameter.matrix else 0.0
        if rule is not None and rule.weight_decay is not None:
            decay = rule.weight_decay
        by_muon = muon and parameter.matrix and not parameter.head
        rate = (rule.lr_multiplier if rule else 1.0) * (adam_rate if muon and not by_muon else 1.0)
        group = Group(decay, rate, by_muon)
        key = (place, not parameter.matrix, not by_muon)
        groups.setdefault(key, (group, []))[1].append(parameter.name)
    return [groups[key] for key in sorted(groups)]
