"""The engine as everybody outside this room sees it; imports no deepspeed.

`build.build_engine` returns one: ZeroEngine, or PipelineEngine where the JSON has stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from harness.checkpoint.index import Fragment
from harness.data.batch import Batch
from harness.layout.box import Part
from harness.layout.grid import Purpose
from harness.plan.plan import Plan

# Decides, alike on all ranks, from this rank's part of the loss and the norm to leave a step out.
Judge = Callable[[torch.Tensor, torch.Tensor], bool]
# Fills a flat tensor with elements [offset, offset + numel) of a part of (name, kind), where it is
# stored.
Fill = Callable[[str, str, int, torch.Tensor, Part], None]
# The kinds of optimizer state that were saved of a parameter.
Kinds = Callable[[str], Collection[str]]
# Plain numbers by section: "counters", "loss_scaling", "optimizer".
Scalars = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Tensors stay on the device: reading them waits for it.

    `loss_share`: this rank's part of the loss; the sum over data ranks is the mean over the target
    tokens of the global batch. `grad_norm`: before clipping, over all ranks.
    """

    loss_share: torch.Tensor
    grad_norm: float | torch.Tensor


@dataclass(frozen=True)
class Replica:
    """Elements of a weight that other ranks of the stage should hold bit for bit."""

    name: str
    tensor: torch.Tensor
    ranks: tuple[int, ...]
    """Those that hold them, this one included, ascending."""
    is_whole: bool
    """True if no axis divides the weight."""


class Engine(Protocol):
    """A model that trains in the layout of a plan. All ranks make the same calls in one order."""

    # --- train and evaluate ---

    def train_batch(
        self, batches: list[Batch], targets: int, lr: float, is_spike: Judge | None = None
    ) -> StepResult:
        """Take one optimizer step on this rank's micro-batches of a global batch.

        `targets`: target tokens of the whole global batch, over all ranks.
        Raises RunStopped (diverged) when fp16's loss scale cannot fall any further.
        """

    def eval_batch(
        self, batches: list[Batch], by_position: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (summed loss in nats, target tokens) of these micro-batches, fp64, unreduced; the
        same is added to `by_position` (buckets, 2), fp64, on this rank's device.

        Buckets are equal ranges of how many tokens a target's own token sees before it. Where
        states are carried, contiguous text (Batch.windows) is taken in the order of the calls.
        """

    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits (vocab_size,) after the last of `input_ids` (1, tokens)."""

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data ranks, in place."""

    @property
    def step_applied(self) -> bool:
        """False after a step that was skipped and changed nothing."""

    @property
    def skipped_steps(self) -> int:
        """Steps not applied, since the start."""

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before its backward pass: 1 but for fp16."""

    def expert_tokens(self) -> torch.Tensor | None:
        """Return (layers, experts) int64, on this rank's device: tokens of training batches that
        the routers of all ranks sent to each expert since the last call; None unless experts are
        divided. Collective.
        """

    def count_sources(self, sources: int) -> None:
        """Sum the training loss of each source of a mixture from here on."""

    def source_losses(self) -> torch.Tensor | None:
        """Return (sources,) fp64: summed training loss of each source since the last call, of all
        ranks; None if it is not counted. Collective.
        """

    # --- hold ---

    def fragments(self, states: bool = True) -> list[Fragment]:
        """Return this rank's share of what is to be saved, as views of live memory: together the
        ranks have every element once. Without `states`, those of the optimizer and those that rows
        carry, weights alone.
        """

    def restore(self, fill: Fill, kinds: Kinds) -> None:
        """Fill weights, their `kinds` of optimizer state, and the states that rows carry. Not
        collective; may raise on a rank.

        Once it raised on none, `refresh_weights` follows.
        """

    def refresh_weights(self) -> None:
        """Compute with what `restore` has filled."""

    def scalars(self) -> Scalars:
        """Return counters, loss scaling and the optimizer's steps; the same on all ranks."""

    def restore_scalars(self, saved: Scalars) -> None:
        """Set what `scalars` gave; after `restore`."""

    def replicated(self) -> Iterator[Replica]:
        """Yield what this rank holds in common with others of its stage between steps, in the same
        order on all of them.
        """

    def tied(self) -> list[tuple[str, torch.Tensor, dist.ProcessGroup]]:
        """Return (name, weight, the ranks that have it) of what another stage holds, too."""

    # --- see ---

    @property
    def plan(self) -> Plan:
        """The plan that it was built from."""

    @property
    def device(self) -> torch.device:
        """This rank's device."""

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face model; with stages the whole one, without its weights."""

    def group_of(self, purpose: Purpose) -> dist.ProcessGroup:
        """This rank's group for a purpose. KeyError where the layout has no use for it."""

    def describe(self) -> dict[str, Any]:
        """Return the classes, the ZeRO stage and the elements that really are on this rank."""

    def write_monitors(self, events: list[tuple[str, float, int]]) -> None:
        """Pass (name, value, samples) to the monitors that the JSON enables; rank 0 only."""

    # --- end ---

    def close(self) -> None:
        """Give back hooks, buffers and files; the engine is unusable afterwards."""
