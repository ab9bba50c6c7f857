"""The engine's interface for all other packages; does not import deepspeed.

`build.build_engine` returns a ZeroEngine, or a PipelineEngine if the JSON has pipeline stages.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from harness.checkpoint.tensor_file import Fragment
from harness.data.batch import Batch
from harness.guard.skip import SkipRule
from harness.layout.box import Part
from harness.layout.grid import Purpose
from harness.models.loss import LossSetup
from harness.plan.plan import Plan

# Fill(name, kind, offset, out, part): read elements [offset, offset + numel) of a slice into the
# flat tensor `out`, in place.
Fill = Callable[[str, str, int, torch.Tensor, Part], None]
# Kinds(name): the kinds of optimizer state that were saved for a parameter.
Kinds = Callable[[str], Collection[str]]
# Plain numbers by section: "counters", "loss_scaling", "optimizer".
Scalars = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Tensors stay on the device; reading one waits for it.

    `loss_share`: this rank's part of the loss; summed over the data-parallel ranks it is the mean
    over the target tokens of the global batch. `grad_norm`: before clipping, over all ranks.
    """

    loss_share: torch.Tensor
    grad_norm: float | torch.Tensor


@dataclass(frozen=True)
class Replica:
    """Elements of a weight that other ranks of the stage should hold bit for bit."""

    name: str
    tensor: torch.Tensor
    ranks: tuple[int, ...]
    """The ranks that hold these elements, including this one, ascending."""
    group: dist.ProcessGroup | None
    """Group of the tensor-parallel ranks among them, each of which computes the gradient itself."""


@dataclass(frozen=True)
class ByGroup:
    """Groups of tokens whose losses an evaluation sums apart."""

    sums: torch.Tensor
    """(groups, 2) fp64 on the rank's device: nats and targets, which are added to."""
    of: Callable[[Batch], torch.Tensor]
    """Returns the group of each token of a micro-batch, (micro_batch, seq_len) int64 on the CPU;
    called once for each, in order."""


class Engine(Protocol):
    """A model in training, in the layout of a plan. All ranks make the same calls in order.
    ZeroEngine (zero.py) says what each of them does.
    """

    plan: Plan
    device: torch.device
    setup: LossSetup

    # Train and evaluate.
    def train_batch(
        self, batches: list[Batch], targets: int, lr: float, skip_rule: SkipRule | None = None
    ) -> StepResult: ...
    def eval_batch(self, batches: list[Batch], by_group: ByGroup | None = None) -> torch.Tensor: ...
    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor: ...
    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor: ...
    @property
    def step_applied(self) -> bool: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def loss_scale(self) -> float: ...
    def expert_tokens(self) -> torch.Tensor | None: ...
    def count_sources(self, sources: int) -> None: ...
    def source_losses(self) -> torch.Tensor | None: ...

    # Weights and states.
    def fragments(self, states: bool = True) -> list[Fragment]: ...
    def restore(self, fill: Fill, kinds: Kinds) -> None: ...
    def refresh_weights(self) -> None: ...
    def scalars(self) -> Scalars: ...
    def restore_scalars(self, saved: Scalars) -> None: ...
    def replicated(self) -> Iterator[Replica]: ...
    def tied(self) -> list[tuple[str, torch.Tensor, dist.ProcessGroup]]: ...

    # Inspect.
    def undivided(self) -> PreTrainedModel: ...
    def gradients_apart(self) -> dict[str, float]: ...
    @property
    def module(self) -> PreTrainedModel: ...
    def group_of(self, purpose: Purpose) -> dist.ProcessGroup: ...
    def describe(self) -> dict[str, Any]: ...
    def write_monitors(self, events: list[tuple[str, float, int]]) -> None: ...
    def close(self) -> None: ...
