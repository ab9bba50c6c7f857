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


class Engine(Protocol):
    """A model in training, in the layout of a plan. All ranks make the same calls in order."""

    plan: Plan
    device: torch.device
    setup: LossSetup

    # --- train and evaluate ---

    def train_batch(
        self, batches: list[Batch], targets: int, lr: float, skip_rule: SkipRule | None = None
    ) -> StepResult:
        """Take one optimizer step on this rank's micro-batches of a global batch.

        `targets`: target tokens of the global batch, over all ranks; without any, the step is
        skipped. Raises RunStopped (diverged) if fp16's loss scale is already at its minimum.
        """

    def eval_batch(
        self, batches: list[Batch], by_position: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (summed loss in nats, target tokens) of these micro-batches, fp64, unreduced;
        zeros on all pipeline stages but the last. Also add the same per context length to
        `by_position` (buckets, 2), fp64, on this rank's device.

        Buckets are equal ranges of the number of tokens visible to the target's input token. With
        recurrent state carried over, contiguous text (Batch.windows) must come in call order.
        """

    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (vocab_size,) after the last token of `input_ids` (1, tokens), which
        are the same on all ranks, as are the logits: ranks that chose other tokens would diverge.
        """

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data-parallel ranks, in place."""

    @property
    def step_applied(self) -> bool:
        """False after a step that was skipped and changed nothing."""

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped since the start."""

    @property
    def loss_scale(self) -> float:
        """Factor by which the loss is multiplied before the backward pass; 1 except in fp16."""

    def expert_tokens(self) -> torch.Tensor | None:
        """Return (layers, experts) int64 on this rank's device: training tokens that all ranks'
        routers sent to each expert since the last call. None without expert parallelism.
        Collective.
        """

    def count_sources(self, sources: int) -> None:
        """Start summing the training loss of each source of a mixture."""

    def source_losses(self) -> torch.Tensor | None:
        """Return (sources,) fp64: the training loss of each source summed over all ranks since the
        last call; None if sources are not counted. Collective.
        """

    # --- weights and states ---

    def fragments(self, states: bool = True) -> list[Fragment]:
        """Return the fragments that this rank saves, as views of live memory; the ranks together
        hold every element once. Without `states`, weights only: no optimizer state, no recurrent
        state.
        """

    def restore(self, fill: Fill, kinds: Kinds) -> None:
        """Fill weights, the `kinds` of optimizer state and the recurrent state of each row. Not
        collective; may raise on one rank only.

        If no rank raised, call `refresh_weights` next.
        """

    def refresh_weights(self) -> None:
        """Update the weights used for computing from those that `restore` filled. Collective."""

    def scalars(self) -> Scalars:
        """Return counters, loss scaling and the optimizer's step count; equal on all ranks."""

    def restore_scalars(self, saved: Scalars) -> None:
        """Restore the values returned by `scalars`; call it after `restore`."""

    def replicated(self) -> Iterator[Replica]:
        """Yield the elements that ranks of a stage hold in common, in the same order on all."""

    def tied(self) -> list[tuple[str, torch.Tensor, dist.ProcessGroup]]:
        """Return (name, weight, group) of each weight that another stage holds too."""

    # --- inspect ---

    def undivided(self) -> PreTrainedModel:
        """Return the full model of which ranks hold slices or stages, without weights."""

    def gradients_apart(self) -> dict[str, float]:
        """Return how far gradients of unsliced parameters differ over tensor ranks. Collective."""

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face model; with pipeline stages, the whole model without its weights."""

    def group_of(self, purpose: Purpose) -> dist.ProcessGroup:
        """Return this rank's group for a purpose. Raises KeyError if the layout does not use it."""

    def describe(self) -> dict[str, Any]:
        """Return the classes, the ZeRO stage and the number of elements actually on this rank."""

    def write_monitors(self, events: list[tuple[str, float, int]]) -> None:
        """Pass (name, value, samples) to the monitors enabled in the JSON; rank 0 only."""

    # --- end ---

    def close(self) -> None:
        """Release hooks, buffers and files; the engine is unusable afterwards."""
