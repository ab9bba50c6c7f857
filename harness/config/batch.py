"""The global batch: its division over data ranks, and its growth over a run.

Both depend only on the samples consumed, so a run that resumes in any layout, or continues past
discarded samples, reads the same samples. A sample always has data.seq_len tokens; while sequences
are shorter, it is read as several sequences and no token is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.config.assignments import multiples_near

MAX_DEFAULT_MICRO_BATCH = 8


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


@dataclass(frozen=True)
class BatchSizes:
    """global_batch = micro_batch x grad_accum x data ranks; batch sizes in windows."""

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
    ) -> BatchSizes:
        """Split a global batch. A size that is None is chosen, with micro-batches of at most 8
        windows; plan/speed.py chooses again where the memory is known.

        `quantum`: every batch of a ramp is a multiple of this many windows and is split in the same
        way. Raises ValueError, with the nearest valid values, if the given sizes do not multiply to
        the global batch.
        """
        if global_batch % data_ranks:
            raise ValueError(
                f"train.global_batch = {global_batch} is not divisible by {data_ranks} data "
                f"ranks: the nearest valid values are {multiples_near(global_batch, data_ranks)}"
            )
        if quantum is not None and quantum % data_ranks:
            raise ValueError(
                f"ramp.batch_from and ramp.batch_step make batches in multiples of {quantum} "
                f"windows, which is not divisible by {data_ranks} data ranks: make both multiples "
                f"of {data_ranks}"
            )
        per_rank = global_batch // data_ranks
        smallest = per_rank if quantum is None else quantum // data_ranks
        legal_sizes, accums = divisors(smallest), divisors(per_rank)
        for key, size, legal_ones in (
            ("train.micro_batch", micro_batch, legal_sizes),
            ("gradient_accumulation_steps", grad_accum, accums),
        ):
            if size is not None and size not in legal_ones:
                nearest = sorted(legal_ones, key=lambda legal: abs(legal - size))[:2]
                least = "" if smallest == per_rank else f", at least {smallest} under ramp.*"
                raise ValueError(
                    f"{key} = {size} does not divide the {per_rank} windows per data rank{least} "
                    f"(train.global_batch {global_batch} / {data_ranks} data ranks): "
                    f"the nearest valid values are {' and '.join(map(str, sorted(nearest)))}"
                )
        if micro_batch is None:
            largest = max(size for size in legal_sizes if size <= MAX_DEFAULT_MICRO_BATCH)
            micro_batch = largest if grad_accum is None else per_rank // grad_accum
            if micro_batch not in legal_sizes:
                raise ValueError(
                    f"gradient_accumulation_steps = {grad_accum} makes micro-batches of "
                    f"{micro_batch} windows, but the ramp's first steps have {smallest} per data "
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


@dataclass(frozen=True)
class Slice:
    """The samples that one optimizer step reads, across all ranks."""

    first_sample: int
    global_batch: int
    """Number of samples."""
    pieces: int = 1
    """Number of sequences that each sample is split into."""

    @property
    def samples(self) -> list[int]:
        """Index of the first sample, and one past the last."""
        return [self.first_sample, self.first_sample + self.global_batch]


@dataclass(frozen=True)
class Curriculum:
    """Batch size and sequence length, each rising in equal parts over a number of samples."""

    global_batch: int
    """Samples per step after the ramp."""
    batch_from: int | None = None
    """Samples in the first step; None: global_batch from the start."""
    batch_step: int | None = None
    """Samples added by each increase; None: batch_from."""
    batch_samples: int = 0
    """Number of samples over which the batch grows."""
    most_pieces: int = 1
    """Sequences that the first samples are split into: a power of two, later halved down to 1."""
    length_samples: int = 0
    """Number of samples over which sequences grow."""

    def at(self, samples: int) -> Slice:
        """Return the slice of the step that starts after `samples` consumed samples."""
        return Slice(samples, self._batch(samples), self._pieces(samples))

    def walk(self, samples: int) -> Iterator[Slice]:
        """Yield the slices of that step and all later steps, without end."""
        while True:
            step = self.at(samples)
            yield step
            samples += step.global_batch

    @property
    def rises(self) -> bool:
        """True if the first steps have smaller batches or shorter sequences."""
        return self.batch_from is not None or self.most_pieces > 1

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Return the samples consumed after `steps` more optimizer steps, starting at `samples`."""
        while steps > 0:
            taken = self._taken_at_once(steps, samples)
            samples, steps = samples + taken * self._batch(samples), steps - taken
        return samples

    def steps_for(self, samples: int) -> int:
        """Return the number of optimizer steps that consume at least `samples`."""
        steps = consumed = 0
        while consumed < samples:
            batch = self._batch(consumed)
            left = math.ceil((samples - consumed) / batch)
            taken = self._taken_at_once(left, consumed)
            consumed, steps = consumed + taken * batch, steps + taken
        return steps

    @property
    def quantum(self) -> int:
        """Greatest common divisor of the batches of all steps, in samples."""
        if self.batch_from is None:
            return self.global_batch
        return math.gcd(self.global_batch, self.batch_from, self.batch_step or self.batch_from)

    @property
    def _levels(self) -> int:
        """Number of times the batch grows."""
        assert self.batch_from is not None
        return (self.global_batch - self.batch_from) // (self.batch_step or self.batch_from)

    def _batch(self, samples: int) -> int:
        if self.batch_from is None or samples >= self.batch_samples:
            return self.global_batch
        level = samples * self._levels // self.batch_samples
        return self.batch_from + level * (self.batch_step or self.batch_from)

    def _taken_at_once(self, steps: int, samples: int) -> int:
        """Return how many of `steps` steps from `samples` on have the same batch, at least one."""
        taken = int(min(steps, self._steps_at_this_batch(samples)))
        assert taken > 0, f"no step advances {self} from sample {samples}"
        return taken

    def _steps_at_this_batch(self, samples: int) -> int | float:
        """Return the steps until the batch next grows; infinity if it does not."""
        if self.batch_from is None or samples >= self.batch_samples:
            return math.inf
        level = samples * self._levels // self.batch_samples
        end = -(-(level + 1) * self.batch_samples // self._levels)
        return math.ceil((end - samples) / self._batch(samples))

    def _pieces(self, samples: int) -> int:
        if samples >= self.length_samples:
            return 1
        halvings = self.most_pieces.bit_length() - 1
        return self.most_pieces >> (samples * halvings // self.length_samples)
