"""Learning rate and batch size as pure functions of the step.

Nothing here remembers anything: a run that resumes at step s, or asks about step s before it
starts, gets the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MAX_DEFAULT_MICRO_BATCH = 8


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _restarts(progress: float, schedule: Schedule) -> float:
    """Cosine, again and again (arXiv 1608.03983); a cycle is `cycle_growth` times the last."""
    last = schedule.cycles - 1  # in units of which the others are: no power is too large
    lengths = [schedule.cycle_growth ** (cycle - last) for cycle in range(schedule.cycles)]
    begin, shares = 0.0, [length / sum(lengths) for length in lengths]
    for share in shares[:-1]:
        if progress < begin + share - 1e-12:  # where it ends the next begins
            break
        begin += share
    else:
        share = shares[-1]
    return _cosine(min(1.0, (progress - begin) / share))


# Progress through the decay in [0, 1] -> share of the way from min_lr (0) to max_lr (1).
DECAYS: dict[str, Callable[[float, Schedule], float]] = {
    "constant": lambda _progress, _: 1.0,
    "linear": lambda progress, _: 1.0 - progress,
    "cosine": lambda progress, _: _cosine(progress),
    # Warm-up, stable, decay (arXiv 2404.06395); linear decay as in arXiv 2405.18392.
    "wsd": lambda progress, _: 1.0 - progress,
    "polynomial": lambda progress, schedule: (1.0 - progress) ** schedule.power,
    "cosine_restarts": _restarts,
    # As in arXiv 1706.03762, section 5.3: of the step alone, see Schedule.lr.
    "inverse_sqrt": lambda _progress, _: 1.0,
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run.

    Steps count from 1: `lr(1)` is used by the first optimizer step, `lr(warmup_steps)` is the
    maximum and `lr(total_steps)` is `max_lr * min_lr_ratio`, where it stays ("inverse_sqrt" never
    falls below that, and need not get there).  No step is wasted at
    a learning rate of zero, as DeepSpeed's own schedulers waste their first two.
    """

    name: str
    """One of `DECAYS`."""
    max_lr: float
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    """Floor of the decay as a share of max_lr; not used by "constant"."""
    decay_fraction: float = 0.2
    """Share of total_steps that "wsd" spends decaying at the end."""
    warmup_type: Literal["linear", "log"] = "linear"
    power: float = 2.0
    """Of "polynomial"."""
    cycles: int = 4
    """Of "cosine_restarts"."""
    cycle_growth: float = 1.0
    """How many times as long as the last one each cycle is."""

    def __post_init__(self) -> None:
        if self.name not in DECAYS:
            raise ValueError(f"unknown schedule {self.name!r}: one of {', '.join(DECAYS)}")

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        if step < self.warmup_steps:
            return self.max_lr * self._ramp(step)
        if self.name == "constant":
            return self.max_lr
        if self.name == "inverse_sqrt":
            share = math.sqrt(max(1, self.warmup_steps) / step)
            return self.max_lr * max(self.min_lr_ratio, share)
        share = DECAYS[self.name](self._decay_progress(step), self)
        return self.max_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)

    def _ramp(self, step: int) -> float:
        """Share of the maximum that a step of the warm-up has reached."""
        if self.warmup_type == "log":
            return math.log(step + 1) / math.log(self.warmup_steps + 1)
        return step / self.warmup_steps

    def _decay_progress(self, step: int) -> float:
        first = self.warmup_steps
        if self.name == "wsd":
            first = max(first, self.total_steps - round(self.decay_fraction * self.total_steps))
        # A run shorter than its warm-up has no steps to decay in; past its end it is at the floor.
        return min(1.0, max(0, step - first) / max(1, self.total_steps - first))


def _divisors(number: int) -> list[int]:
    """Every divisor, in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


@dataclass(frozen=True)
class Batch:
    """global_batch = micro_batch x grad_accum x data ranks; the first two in samples."""

    global_batch: int
    micro_batch: int
    grad_accum: int

    @classmethod
    def divided(
        cls,
        global_batch: int,
        data_ranks: int,
        micro_batch: int | None,
        grad_accum: int | None,
        quantum: int | None = None,
    ) -> Batch:
        """Split a global batch; what is None is chosen, micro-batches being at most 8 samples.

        `quantum`: samples of which the batches of a ramp are multiples, and have to be split alike.
        Raises ValueError, with the nearest legal values, where the numbers do not multiply.
        """
        if global_batch % data_ranks:
            below = global_batch // data_ranks * data_ranks
            legal = " or ".join(str(batch) for batch in (below, below + data_ranks) if batch > 0)
            raise ValueError(
                f"train.global_batch = {global_batch} does not divide over {data_ranks} data "
                f"ranks: the nearest that do are {legal}"
            )
        if quantum is not None and quantum % data_ranks:
            raise ValueError(
                f"ramp.batch_from and ramp.batch_step make batches of multiples of {quantum} "
                f"samples, which do not divide over {data_ranks} data ranks: make both multiples "
                "of that"
            )
        per_rank = global_batch // data_ranks
        smallest = per_rank if quantum is None else quantum // data_ranks
        legal_sizes, accums = _divisors(smallest), _divisors(per_rank)
        for key, size, legal_ones in (
            ("train.micro_batch", micro_batch, legal_sizes),
            ("gradient_accumulation_steps", grad_accum, accums),
        ):
            if size is not None and size not in legal_ones:
                nearest = sorted(legal_ones, key=lambda legal: abs(legal - size))[:2]
                least = "" if smallest == per_rank else f", {smallest} at least under ramp.*"
                raise ValueError(
                    f"{key} = {size} does not divide the {per_rank} samples of a data rank{least} "
                    f"(train.global_batch {global_batch} / {data_ranks} data ranks): "
                    f"the nearest that do are {' and '.join(map(str, sorted(nearest)))}"
                )
        if micro_batch is None:
            largest = max(size for size in legal_sizes if size <= MAX_DEFAULT_MICRO_BATCH)
            micro_batch = largest if grad_accum is None else per_rank // grad_accum
            if micro_batch not in legal_sizes:
                raise ValueError(
                    f"gradient_accumulation_steps = {grad_accum} makes micro-batches of "
                    f"{micro_batch} samples, but the ramp's first steps have {smallest} for a data "
                    f"rank (ramp.batch_from, ramp.batch_step): set it to {per_rank // smallest} or "
                    'more, or "auto"'
                )
        steps = per_rank // micro_batch
        if grad_accum not in (None, steps):
            raise ValueError(
                f"gradient_accumulation_steps = {grad_accum}, but train.global_batch "
                f"{global_batch} = train.micro_batch {micro_batch} x {data_ranks} data ranks x "
                f'{steps}: set it to {steps} or "auto"'
            )
        return cls(global_batch, micro_batch, steps)
