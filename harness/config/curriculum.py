"""Batch size and sequence length as pure functions of the samples consumed.

A run that resumes in any layout, or continues past discarded samples, therefore reads the same
samples. A sample is always data.seq_len tokens: while sequences are still shorter, it is read as
several of them, and no token is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """The samples that one optimizer step reads, over all ranks."""

    first_sample: int
    global_batch: int
    """Samples."""
    pieces: int = 1
    """Sequences that each sample is split into."""

    @property
    def samples(self) -> list[int]:
        """Index of the first sample, and one past the last."""
        return [self.first_sample, self.first_sample + self.global_batch]


@dataclass(frozen=True)
class Curriculum:
    """Batch size and sequence length, each rising in equal parts of a number of samples."""

    global_batch: int
    """Samples per step at the end of the rise."""
    batch_from: int | None = None
    """Samples of the first step; None: global_batch from the start."""
    batch_step: int | None = None
    """Samples that each rise adds; None: batch_from."""
    batch_samples: int = 0
    """Samples over which the batch rises."""
    most_pieces: int = 1
    """Sequences that the first samples are split into, a power of two, later halved down to 1."""
    length_samples: int = 0
    """Samples over which sequences grow."""

    def at(self, samples: int) -> Slice:
        """Return the slice of the step that begins after `samples` consumed."""
        return Slice(samples, self._batch(samples), self._pieces(samples))

    def walk(self, samples: int) -> Iterator[Slice]:
        """Yield that slice and all after it, without end."""
        while True:
            step = self.at(samples)
            yield step
            samples += step.global_batch

    @property
    def rises(self) -> bool:
        """True if the first steps have smaller batches or shorter sequences."""
        return self.batch_from is not None or self.most_pieces > 1

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Return the samples consumed after `steps` more optimizer steps from `samples` on."""
        while steps > 0:
            taken = int(min(steps, self._steps_at_this_batch(samples)))
            samples, steps = samples + taken * self._batch(samples), steps - taken
        return samples

    def steps_for(self, samples: int) -> int:
        """Return the number of optimizer steps that consume at least `samples`."""
        steps = consumed = 0
        while consumed < samples:
            batch = self._batch(consumed)
            left = math.ceil((samples - consumed) / batch)
            taken = int(min(left, self._steps_at_this_batch(consumed)))
            consumed, steps = consumed + taken * batch, steps + taken
        return steps

    @property
    def quantum(self) -> int:
        """Common divisor, in samples, of the batches of all steps."""
        if self.batch_from is None:
            return self.global_batch
        return math.gcd(self.global_batch, self.batch_from, self.batch_step or self.batch_from)

    @property
    def _levels(self) -> int:
        """Number of times that the batch rises."""
        assert self.batch_from is not None
        return (self.global_batch - self.batch_from) // (self.batch_step or self.batch_from)

    def _batch(self, samples: int) -> int:
        if self.batch_from is None or samples >= self.batch_samples:
            return self.global_batch
        level = samples * self._levels // self.batch_samples
        return self.batch_from + level * (self.batch_step or self.batch_from)

    def _steps_at_this_batch(self, samples: int) -> int | float:
        """Return the steps until the batch next rises; infinity if it no longer does."""
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
