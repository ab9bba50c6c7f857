"""The optimizer steps of a run: samples, learning rate and random seed of each.

A step depends only on the plan and on the number of steps and samples before it, so a resumed run
takes the same steps in any layout.
"""

import hashlib
import time
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from harness.checkpoint.manifest import TrainState
from harness.config.batch import Slice
from harness.data.batch import Batch
from harness.data.batches import StepData, Stream
from harness.plan.plan import Plan


@dataclass(frozen=True)
class Step:
    """One optimizer step to be taken."""

    number: int
    """Counted from 1."""
    reads: Slice
    """The samples of the global batch."""
    batches: list[Batch]
    """This rank's micro-batches."""
    targets: int
    """Target tokens of the global batch."""
    lr: float
    dropout_seed: int
    targets_by_source: list[int]
    """Target tokens of the global batch, by source of a mixture; empty without a mixture."""
    tokens: int
    """Tokens of the global batch, excluding the padding of padded micro-batches."""
    positions: int
    """Positions computed for the global batch, including padding."""
    waited_s: float
    """Seconds that this rank waited for the step's data."""


class Steps:
    """The remaining steps of a run, from `state` on. Each is first taken, then marked done."""

    def __init__(self, plan: Plan, train: Stream, total: int) -> None:
        self.state = TrainState()
        self.total = total
        """Number of the last step."""
        self._plan, self._train = plan, train
        self._schedule = plan.schedule(total)
        self._share = plan.share
        self._ahead: Generator[StepData] | None = None

    @property
    def are_left(self) -> bool:
        """True until the last step is done."""
        return self.state.step < self.total

    @property
    def next_slice(self) -> Slice:
        """The samples that the next step reads."""
        return self._plan.curriculum.at(self.state.samples)

    def take(self) -> Step:
        """Return the next step, after waiting for its batches."""
        began = time.perf_counter()
        if self._ahead is None:
            self._ahead = self._read_ahead()
        number, reads, train = self.state.step + 1, self.next_slice, self._train
        data = next(self._ahead)
        return Step(
            number,
            reads,
            data.batches,
            train.targets_in(reads.first_sample, reads.global_batch),
            self._schedule.lr(number),
            dropout_seed(self._plan.config.train.seed, number, self._share.dropout_rank),
            train.targets_by_source(reads.first_sample + np.arange(reads.global_batch)),
            data.tokens,
            data.positions,
            time.perf_counter() - began,
        )

    def done(self, step: Step) -> None:
        """Advance the state past a step."""
        self.state = self.state.after(step.reads.global_batch, step.tokens)

    def move(self, state: TrainState) -> None:
        """Continue from another state, earlier or later."""
        self.close()
        self.state = state

    def close(self) -> None:
        """Stop prefetching batches."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _read_ahead(self) -> Generator[StepData]:
        return self._train.steps(
            self.state.samples,
            curriculum=self._plan.curriculum,
            micro_batch=self._plan.micro_batch,
            data_rank=self._share.data_rank,
            data_ranks=self._share.data_ranks,
            prefetch=self._plan.config.data.prefetch,
            pin_memory=self._plan.world.accelerator == "cuda",
        )


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the dropout seed of a step, so that resuming does not need to restore a generator."""
    digest = hashlib.sha256(f"dropout:{seed}:{step}:{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
