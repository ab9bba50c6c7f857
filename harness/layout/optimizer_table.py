"""The optimizers: what each takes, keeps and can be spread over; and the groups it steps.

A ZeRO stage hands an optimizer flat pieces of weights. Most treat every element alike, and do not
notice; those that look at a whole matrix have to be given one, or would learn something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Optimizer:
    """One value of optim.name."""

    json_type: str
    """Its name in a DeepSpeed JSON."""
    takes: tuple[str, ...]
    """Keys of optim.*, beside lr and weight_decay."""
    state_bytes: int
    """Of an element, beside the master weight, where states are fp32."""
    momentum: float = 0.0
    """optim.momentum, where it is not given."""
    by_deepspeed: bool = False
    """Built and compiled by DeepSpeed; else by engine/optimizers.py, on top of torch."""
    layouts: str = "any"
    """any; unoffloaded: not with its states on the host; whole: ZeRO 0 alone, in fp32."""
    package: str | None = None
    """The Python package that it needs."""


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
    "adam8bit": Optimizer("AdamW8bit", _ADAM, 2, layouts="unoffloaded", package="bitsandbytes"),
}
"""Each has its reference in tests/engine/test_optimizers.py."""


class GroupRule(Protocol):
    """Other settings for the parameters whose names match `pattern`: an entry of optim.groups."""

    @property
    def pattern(self) -> str:
        """Regular expression, searched for in names."""

    @property
    def lr_multiplier(self) -> float:
        """Their learning rate, in units of the others'."""

    @property
    def weight_decay(self) -> float | None:
        """Their weight decay; None keeps what they would have."""

    @property
    def frozen(self) -> bool:
        """True if they are not trained."""


@dataclass(frozen=True)
class Group:
    """Settings that the parameters of one optimizer group share."""

    weight_decay: float
    lr_multiplier: float = 1.0
    muon: bool = False
    """Stepped by Muon's rule: matrices of the layers; the rest of a Muon run is AdamW's."""


@dataclass(frozen=True)
class Parameter:
    """The properties of a parameter that decide its group."""

    name: str
    matrix: bool
    """True if it decays: a matrix, and no embedding."""
    head: bool = False


def first_match(name: str, rules: Iterable[GroupRule]) -> GroupRule | None:
    """Return the rule that applies to a parameter."""
    return next((rule for rule in rules if re.search(rule.pattern, name)), None)


def is_frozen(name: str, rules: Iterable[GroupRule]) -> bool:
    """Return whether a rule keeps a parameter from being trained."""
    rule = first_match(name, rules)
    return rule is not None and rule.frozen


def optimizer_groups(
    parameters: Iterable[Parameter],
    weight_decay: float,
    rules: Iterable[GroupRule] = (),
    muon: bool = False,
) -> list[tuple[Group, list[str]]]:
    """Return groups and the names in them: first matrices, then biases, norms and embeddings, then
    those of the rules. Of the rules that match a name, the first counts.
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
        group = Group(decay, rule.lr_multiplier if rule else 1.0, by_muon)
        key = (place, not parameter.matrix, not by_muon)
        groups.setdefault(key, (group, []))[1].append(parameter.name)
    return [groups[key] for key in sorted(groups)]
