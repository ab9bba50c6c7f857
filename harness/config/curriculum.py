"""Batch size and sequence length as pure functions of the samples consumed.

A run that resumes, in whatever layout, or goes on past samples that it threw away, asks for the
same samples again. A sample is always data.seq_len tokens: where sequences are still shorter, it is
read as several of them, and no token is lost.
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
    """Sequences that a sample is read as."""

    @property
    def samples(self) -> list[int]:
        """The first sample, and the first behind the slice."""
        return [self.first_sample, self.first_sample + self.global_batch]


@dataclass(frozen=True)
class Curriculum:
    """How batch and length rise: in equal parts of the samples over which they do."""

    global_batch: int
    """Samples of a step once it has risen."""
    batch_from: int | None = None
    """Samples of the first step; None: global_batch from the start."""
    batch_step: int | None = None
    """Samples by which it rises at a time; None: batch_from."""
    batch_samples: int = 0
    """Samples over which it rises."""
    most_pieces: int = 1
    """Sequences that the first samples are read as, a power of two: halved until it is 1."""
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
        """Whether the first steps are not as all later ones."""
        return self.batch_from is not None or self.most_pieces > 1

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Samples consumed after `steps` optimizer steps more than those of the first `samples`."""
        while steps > 0:
            taken = int(min(steps, self._steps_at_this_batch(samples)))
            samples, steps = samples + taken * self._batch(samples), steps - taken
        return samples

    def steps_for(self, samples: int) -> int:
        """Optimizer steps that consume at least `samples`."""
        steps = consumed = 0
        while consumed < samples:
            batch = self._batch(consumed)
            left = math.ceil((samples - consumed) / batch)
            taken = int(min(left, self._steps_at_this_batch(consumed)))
            consumed, steps = consumed + taken * batch, steps + taken
        return steps

    @property
    def quantum(self) -> int:
        """Samples of which every step's batch is a multiple."""
        if self.batch_from is None:
            return self.global_batch
        return math.gcd(self.global_batch, self.batch_from, self.batch_step or self.batch_from)

    @property
    def _levels(self) -> int:
        """Times that the batch rises."""
        assert self.batch_from is not None
        return (self.global_batch - self.batch_from) // (self.batch_step or self.batch_from)

    def _batch(self, samples: int) -> int:
        if self.batch_from is None or samples >= self.batch_samples:
            return self.global_batch
        level = samples * self._levels // self.batch_samples
        return self.batch_from + level * (self.batch_step or self.batch_from)

    def _steps_at_this_batch(self, samples: int) -> int | float:
        """Steps from here on until the batch rises; infinity where it no longer does."""
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
