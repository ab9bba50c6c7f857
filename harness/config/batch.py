"""Division of a global batch into micro-batches of data ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DEFAULT_MICRO_BATCH = 8


def _divisors(number: int) -> list[int]:
    """Return every divisor in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


@dataclass(frozen=True)
class Batch:
    """global_batch = micro_batch x grad_accum x data ranks; the first two in windows."""

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
        """Split a global batch; a size that is None is chosen, micro-batches of at most 8 windows.

        `quantum`: every batch of a ramp is a multiple of this many windows and is split alike.
        Raises ValueError, with the nearest legal values, if the numbers do not multiply.
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
                f"windows, which do not divide over {data_ranks} data ranks: make both multiples "
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
                    f"{key} = {size} does not divide the {per_rank} windows of a data rank{least} "
                    f"(train.global_batch {global_batch} / {data_ranks} data ranks): "
                    f"the nearest that do are {' and '.join(map(str, sorted(nearest)))}"
                )
        if micro_batch is None:
            largest = max(size for size in legal_sizes if size <= MAX_DEFAULT_MICRO_BATCH)
            micro_batch = largest if grad_accum is None else per_rank // grad_accum
            if micro_batch not in legal_sizes:
                raise ValueError(
                    f"gradient_accumulation_steps = {grad_accum} makes micro-batches of "
                    f"{micro_batch} windows, but the ramp's first steps have {smallest} for a data "
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
