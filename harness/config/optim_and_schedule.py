"""The run config's optimizer section, and the learning rate schedule that it describes.

A schedule is one entry in DECAYS, plus a field of OptimConfig for each setting of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from harness.config.sections import (
    CountOrZero,
    Fraction,
    Positive,
    PositiveOrZero,
    Probability,
    Section,
    Text,
    name_in,
)
from harness.layout.optimizer_table import OPTIMIZERS


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _restarts(progress: float, optim: OptimConfig) -> float:
    """Cosine with restarts (arXiv 1608.03983); each cycle is `cycle_growth` times the last one."""
    last = optim.cycles - 1  # relative to the last cycle, so that no power overflows
    lengths = [optim.cycle_growth ** (cycle - last) for cycle in range(optim.cycles)]
    begin, shares = 0.0, [length / sum(lengths) for length in lengths]
    for share in shares[:-1]:
        if progress < begin + share - 1e-12:  # the end of a cycle starts the next
            break
        begin += share
    else:
        share = shares[-1]
    return _cosine(min(1.0, (progress - begin) / share))


class Decay(NamedTuple):
    """The decay of the learning rate after warm-up."""

    share: Callable[..., float]
    """Maps progress in [0, 1] and OptimConfig to the position between the lowest rate (0) and the
    highest (1); a schedule of run.code also gets its values of own.* by keyword."""
    settings: tuple[str, ...] = ()
    """Fields of OptimConfig that only this schedule uses."""
    own: tuple[str, ...] = ()
    """Keys of own.* that it takes."""


DECAYS: dict[str, Decay] = {
    "constant": Decay(lambda _progress, _: 1.0),
    "linear": Decay(lambda progress, _: 1.0 - progress),
    "cosine": Decay(lambda progress, _: _cosine(progress)),
    # Warm-up, stable, decay (arXiv 2404.06395); linear decay as in arXiv 2405.18392.
    "wsd": Decay(lambda progress, _: 1.0 - progress, ("decay_fraction",)),
    "polynomial": Decay(lambda progress, optim: (1.0 - progress) ** optim.power, ("power",)),
    "cosine_restarts": Decay(_restarts, ("cycles", "cycle_growth")),
    # As in arXiv 1706.03762, section 5.3: depends only on the step, see Schedule.lr.
    "inverse_sqrt": Decay(lambda _progress, _: 1.0),
}


class GroupConfig(Section):
    """Parameters with a separate learning rate or weight decay."""

    pattern: Text
    """Regular expression to search for in parameter names."""
    lr_multiplier: PositiveOrZero = 1.0
    """Factor on the learning rate of these parameters."""
    weight_decay: PositiveOrZero | None = None
    """Weight decay of these parameters; None: the one they have without this rule."""
    frozen: bool = False
    """True: keep the initial values, without gradients and optimizer states."""

    @model_validator(mode="after")
    def _is_stepped_or_frozen(self) -> GroupConfig:
        if self.frozen and self.model_fields_set & {"lr_multiplier", "weight_decay"}:
            raise ValueError("frozen parameters take neither lr_multiplier nor weight_decay")
        return self

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a valid regular expression: {error}") from None
        return value


class OptimConfig(Section):
    """The optimizer and its learning rate."""

    name: Annotated[str, name_in(OPTIMIZERS)] = "adamw"
    """adamw, lion, muon, adam8bit and adafactor decouple weight decay; the others add it to the
    gradient (L2). muon updates the matrices of decoder layers, and adamw the rest."""
    lr: Positive = 3e-3
    """Peak learning rate. Default for adamw, adam, adam8bit and muon: a published rate for the
    model's size. For lion use a third to a tenth of adamw's."""
    adam_lr: Positive | None = None
    """With muon: peak learning rate of what adamw updates; None: optim.lr."""
    betas: Annotated[tuple[Probability, Probability], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of Adam's first and second moments, or lion's two rates."""
    eps: Positive = 1e-8
    """Term added to the denominator of Adam and Adagrad."""
    momentum: Probability = 0.0
    """Momentum of sgd, momentum (default 0.9) and muon (default 0.95)."""
    groups: list[GroupConfig] = Field(default_factory=list)
    """Rules for parameters by name; the first match applies: optim.groups='[{pattern="embed",
    lr_multiplier=0.5, weight_decay=0.0}]', or frozen=true."""
    weight_decay: PositiveOrZero = 0.1
    """Weight decay coefficient, multiplied by the learning rate; not applied to biases, norms and
    embeddings."""
    clip_norm: PositiveOrZero = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    clip_value: Positive | None = None
    """Maximum absolute value of a gradient element; excludes clip_norm."""
    schedule: Annotated[str, name_in(DECAYS)] = "cosine"
    """Learning rate after warm-up: cosine, linear, constant, wsd, polynomial, cosine_restarts or
    inverse_sqrt. wsd stays constant and decays at the end; inverse_sqrt falls as
    1 / sqrt(step), regardless of the length of the run."""
    warmup_steps: CountOrZero = 20
    """Steps over which the learning rate rises to optim.lr."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a fraction of all steps, instead of warmup_steps: 0.03 of 100 steps is 3."""
    warmup_type: Literal["linear", "log"] = "linear"
    """Shape of the warm-up; log rises fastest at first, as in DeepSpeed's schedulers."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate, as a fraction of optim.lr; the minimum for inverse_sqrt, unused by
    constant."""
    decay_fraction: Fraction = 0.2
    """Fraction of all steps over which wsd decays."""
    power: Positive = 2.0
    """Exponent of polynomial decay: 1 is linear, larger values fall faster at first."""
    cycles: Annotated[int, Field(gt=0, le=10_000)] = 4
    """Number of cycles of cosine_restarts; each starts at the peak."""
    cycle_growth: Annotated[float, Field(ge=1)] = 1.0
    """Length of each cosine_restarts cycle relative to the previous one."""

    @property
    def momentum_used(self) -> float:
        """`momentum` if the user set it, otherwise the optimizer's usual value."""
        is_set = "momentum" in self.model_fields_set
        return self.momentum if is_set else OPTIMIZERS[self.name].momentum

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of `total_steps`."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * total_steps - 1e-9)  # 0.07 * 100 is slightly above 7

    @property
    def warmup_key(self) -> str:
        """The key that determines the length of the warm-up."""
        return "optim.warmup_steps" if self.warmup_ratio is None else "optim.warmup_ratio"

    @model_validator(mode="after")
    def _one_of_each(self) -> OptimConfig:
        if self.clip_value is not None and self.clip_norm and "clip_norm" in self.model_fields_set:
            raise ValueError("optim.clip_norm and optim.clip_value exclude each other: keep one")
        if self.warmup_ratio is not None and "warmup_steps" in self.model_fields_set:
            raise ValueError(
                "optim.warmup_steps and optim.warmup_ratio exclude each other: keep one"
            )
        if self.adam_lr is not None and self.name != "muon":
            raise ValueError(f"optim.adam_lr is for optim.name=muon, not {self.name}: set optim.lr")
        return self


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run: a pure function of the step.

    Steps count from 1: `lr(1)` is used by the first optimizer step, `lr(warmup)` is the peak, and
    `lr(total_steps)` is `optim.lr * min_lr_ratio`, where it stays ("inverse_sqrt" never falls below
    that value and may not reach it; "constant" stays at the peak). Warm-up starts above zero;
    DeepSpeed's own schedulers run the first two steps at a learning rate of zero.
    """

    optim: OptimConfig
    total_steps: int
    own: Mapping[str, Any] = field(default_factory=dict)
    """Values of own.*."""

    @cached_property
    def warmup(self) -> int:
        """Number of warm-up steps."""
        return self.optim.warmup(self.total_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        optim = self.optim
        if step < self.warmup:
            return optim.lr * self._ramp(step)
        if optim.schedule == "constant":
            return optim.lr
        if optim.schedule == "inverse_sqrt":
            share = math.sqrt(max(1, self.warmup) / step)
            return optim.lr * max(optim.min_lr_ratio, share)
        decay = DECAYS[optim.schedule]
        values = {key: self.own[key] for key in decay.own if key in self.own}
        share = decay.share(self._decay_progress(step), optim, **values)
        return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)

    def _ramp(self, step: int) -> float:
        """Return the fraction of the peak at a warm-up step."""
        if self.optim.warmup_type == "log":
            return math.log(step + 1) / math.log(self.warmup + 1)
        return step / self.warmup

    def _decay_progress(self, step: int) -> float:
        first, total = self.warmup, self.total_steps
        if self.optim.schedule == "wsd":
            first = max(first, total - round(self.optim.decay_fraction * total))
        # A run shorter than its warm-up has no decay; past its end the rate stays at the minimum.
        return min(1.0, max(0, step - first) / max(1, total - first))
