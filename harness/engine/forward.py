"""The forward pass of a micro-batch, from tokens to loss, and carried-over recurrent states."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from harness.checkpoint.tensor_file import Fragment
from harness.data.batch import Batch, on_device
from harness.engine.api import ByGroup, Fill, Kinds
from harness.layout.box import Part
from harness.models.loss import LossSetup, forward
from harness.models.preferences import Pairs
from harness.models.recurrent_state import WINDOWS, Window
from harness.models.token_losses import recording
from harness.plan.plan import Plan

_STATES, _WINDOWS = "carried.states", "carried.windows"


class CarriedStates:
    """The recurrent state of each row of this rank's micro-batches, carried from step to step.

    A row keeps its index in the global batch from step to step, and therefore its rank and
    micro-batch. Checkpoints number rows by that index, so any layout can read them.
    """

    def __init__(self, plan: Plan, model: PreTrainedModel, device: torch.device) -> None:
        self._rows = plan.global_batch
        self._firsts = plan.share.starts(plan.global_batch, plan.micro_batch)
        self._window, self._config = WINDOWS[model.config.model_type], model.config
        self._dtype = model.dtype
        shape = len(self._firsts), plan.micro_batch
        numbers = self._window.numbers(self._config)
        self._states = torch.zeros(*shape, numbers, dtype=torch.float32, device=device)
        self._windows = torch.full(shape, -1)
        """Index of the window of text after which each state was taken, on the host; -1 if none."""
        self._evaluated: tuple[torch.Tensor, torch.Tensor] | None = None
        """Window indices and states after the last evaluated micro-batch."""

    def before(self, number: int, batch: Batch) -> Window:
        """Return the window of a step's micro-batch `number`. Rows start from the state after their
        previous window if that belongs to the same document and is finite, others from zeros.
        """
        self._evaluated = None  # frees its memory
        return self._begun(batch, self._windows[number], self._states[number])

    def keep(self, number: int, batch: Batch, window: Window) -> None:
        """Keep the states at the end of a micro-batch's window."""
        assert batch.windows is not None, "training reads contiguous streams"
        self._states[number] = window.after
        self._windows[number] = batch.windows

    def before_evaluated(self, batch: Batch) -> Window:
        """Return an evaluated micro-batch's window. The training states are unchanged."""
        rows = len(batch.labels)
        if self._evaluated is None or len(self._evaluated[0]) != rows:
            shape = (rows, *self._states.shape[2:])
            self._evaluated = torch.full((rows,), -1), self._states.new_zeros(shape)
        return self._begun(batch, *self._evaluated)

    def keep_evaluated(self, batch: Batch, window: Window) -> None:
        """Keep the states at the end of an evaluated micro-batch's window."""
        assert batch.windows is not None, "other samples begin with zeros"
        self._evaluated = batch.windows, window.after.float()

    def _begun(self, batch: Batch, windows: torch.Tensor, states: torch.Tensor) -> Window:
        """Return a micro-batch's window; rows that continue `windows` begin with `states`."""
        assert batch.windows is not None, "states are carried over contiguous streams"
        assert batch.goes_on is not None, "these know where documents begin"
        goes_on = batch.goes_on & (windows + 1 == batch.windows)
        kept = on_device(goes_on, states.device) & states.isfinite().all(1)
        return self._window(self._config, states.where(kept[:, None], 0), self._dtype)

    def fragments(self) -> list[Fragment]:
        """Return the states of this rank's rows, as views of live memory."""
        return [
            Fragment(name, part, offset, {self._kind: tensor})
            for name, part, offset, tensor in self._pieces()
        ]

    def restore(self, fill: Fill, kinds: Kinds) -> None:
        """Fill the states; zeros if none were saved for this global batch size."""
        for name, part, offset, tensor in self._pieces():
            if self._kind in kinds(name):
                fill(name, self._kind, offset, tensor, part)
            else:
                tensor.fill_(-1 if name == _WINDOWS else 0)

    @property
    def _kind(self) -> str:
        """Kind of these tensors in a checkpoint; differs for each global batch size."""
        return f"of_{self._rows}_rows"

    def _pieces(self) -> list[tuple[str, Part, int, torch.Tensor]]:
        """Return (name, whole, offset, elements) of each micro-batch's states and windows."""
        pieces = []
        for name, tensors in ((_STATES, self._states), (_WINDOWS, self._windows)):
            of_row = tuple(tensors.shape[2:])
            part = Part.of((self._rows, *of_row))
            for first, own in zip(self._firsts, tensors, strict=True):
                pieces.append((name, part, first * prod(of_row), own.view(-1)))
        return pieces


def pairs_of(batch: Batch, device: torch.device) -> Pairs | None:
    """Return a micro-batch's pairs on a device, copied asynchronously; None if it has none, or no
    reference.
    """
    if batch.segments is None or batch.reference is None:
        return None
    return Pairs(on_device(batch.segments, device), on_device(batch.reference, device))


class ForwardPass:
    """The forward passes of a rank, over whole rows or over its section of each row."""

    def __init__(self, engine: Any, plan: Plan, setup: LossSetup) -> None:
        self._engine, self._plan, self._setup = engine, plan, setup
        self._device: torch.device = engine.device
        self._rows = setup.rows
        self.carried: CarriedStates | None = None
        if plan.config.train.carry_state:
            self.carried = CarriedStates(plan, engine.module, self._device)

    def __call__(
        self,
        batch: Batch,
        smoothing: float = 0.0,
        keywords: Mapping[str, Any] = MappingProxyType({}),
        setup: LossSetup | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a micro-batch's token loss and auxiliary loss (models/loss.py), of an evaluation
        without `setup`. Its tokens are copied while the previous micro-batch computes.
        """
        keywords, pairs = {**self.keywords(batch), **keywords}, pairs_of(batch, self._device)
        tokens, setup = batch.on(self._device), setup or self._setup.in_evaluation
        return forward(self._engine, *tokens, setup, smoothing, keywords, pairs)

    def in_training(self, number: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a training micro-batch's two losses, carrying recurrent states over if enabled."""
        smoothing = self._plan.config.train.label_smoothing
        if self.carried is None:
            return self(batch, smoothing, setup=self._setup)
        window = self.carried.before(number, batch)
        losses = self(batch, smoothing, window.keywords, self._setup)
        self.carried.keep(number, batch, window)
        return losses

    def in_evaluation(self, batch: Batch) -> torch.Tensor:
        """Return the summed token loss. Contiguous text continues from the previous micro-batch."""
        if self.carried is None or batch.windows is None:
            return self(batch)[0]
        window = self.carried.before_evaluated(batch)
        loss, _ = self(batch, keywords=window.keywords)
        self.carried.keep_evaluated(batch, window)
        return loss

    def targets(self, batch: Batch) -> float:
        """Return the number of targets that this rank computes, tokens or pairs, of which ranks
        that share rows each count a part; counted on the host.
        """
        if batch.reference is not None:
            return batch.num_pairs / (self._rows.group.size() if self._rows else 1)
        return int((self._own(batch.labels) != -100).sum())

    def last_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last of (1, tokens): (vocab_size,), or this rank's slice."""
        whole = self._rows.undivided() if self._rows else contextlib.nullcontext()
        compiled = self._plan.config.model.compile  # which would compile once per length
        eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
        with whole, eager:
            output = self._engine(input_ids=input_ids.to(self._device), use_cache=False)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def by_group(self, batch: Batch, groups: ByGroup | None) -> AbstractContextManager[None]:
        """Return a context in which token losses and targets are added to the groups' sums."""
        if groups is None:
            return contextlib.nullcontext()
        sums, numbers = groups.sums, self._own(groups.of(batch))
        targets = numbers[self._own(batch.labels) != -100].bincount(minlength=len(sums))
        sums[:, 1] += on_device(targets, self._device)
        return recording(sums[:, 0], on_device(numbers, self._device))

    def keywords(self, batch: Batch) -> dict[str, Any]:
        """Return the attention arguments of a micro-batch."""
        return batch.keywords(self._plan.config.model.attention, self._device)

    def _own(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels of the tokens that this rank computes."""
        return labels if self._rows is None else self._rows.own(labels)
