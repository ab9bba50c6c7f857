"""The forward pass of one micro-batch, from its tokens to its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from harness.data.batch import Batch, on_device
from harness.engine.carried import CarriedStates
from harness.models.by_source import recording
from harness.models.loss import forward
from harness.models.sequence import DividedRows
from harness.plan.plan import Plan


class ForwardPass:
    """The forward passes of a rank: over whole micro-batches, or over its part of each row."""

    def __init__(self, engine: Any, plan: Plan, row_group: dist.ProcessGroup | None) -> None:
        """`row_group`: the ranks that have a part of each row of this one's."""
        self._engine, self._plan = engine, plan
        self._device: torch.device = engine.device
        self._rows = None if row_group is None else DividedRows(engine.module, row_group)
        self.carried: CarriedStates | None = None
        if plan.config.train.carry_state:
            self.carried = CarriedStates(plan, engine.module, self._device)

    def __call__(
        self,
        batch: Batch,
        smoothing: float = 0.0,
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of one micro-batch, copied to the device while the last one still computes."""
        keywords = {**self.keywords(batch), **keywords}
        return forward(self._engine, *batch.on(self._device), smoothing, self._rows, keywords)

    def in_training(self, number: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of a step's micro-batch; its rows' states are carried on, if they are at all."""
        smoothing = self._plan.config.train.label_smoothing
        if self.carried is None:
            return self(batch, smoothing)
        window = self.carried.before(number, batch)
        losses = self(batch, smoothing, window.keywords)
        self.carried.keep(number, batch, window)
        return losses

    def in_evaluation(self, batch: Batch) -> torch.Tensor:
        """The summed token loss of a micro-batch; contiguous text begins with the states behind the
        micro-batch evaluated before it.
        """
        if self.carried is None or batch.windows is None:
            return self(batch)[0]
        window = self.carried.before_evaluated(batch)
        loss, _ = self(batch, keywords=window.keywords)
        self.carried.keep_evaluated(batch, window)
        return loss

    def targets(self, batch: Batch) -> int:
        """Return the target tokens that this rank computes; counted on the host."""
        return int((self._own(batch.labels) != -100).sum())

    def last_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(vocab_size,), or this rank's part of them, after the last of (1, tokens)."""
        whole = self._rows.undivided() if self._rows else contextlib.nullcontext()
        with whole, _uncompiled(self._plan.config.model.compile):  # it would compile many lengths
            output = self._engine(input_ids=input_ids.to(self._device), use_cache=False)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def by_position(self, batch: Batch, sums: torch.Tensor | None) -> AbstractContextManager[None]:
        """Within this, the losses of a micro-batch's tokens are added to `sums` (buckets, 2), and
        their targets counted.
        """
        if sums is None:
            return contextlib.nullcontext()
        length = max(self._plan.config.data.seq_len, batch.labels.shape[1])
        buckets = self._own(batch.buckets(len(sums), length))
        targets = buckets[self._own(batch.labels) != -100].bincount(minlength=len(sums))
        sums[:, 1] += on_device(targets, self._device)
        return recording(sums[:, 0], on_device(buckets, self._device))

    def keywords(self, batch: Batch) -> dict[str, Any]:
        """Return what attention is given of a micro-batch."""
        return batch.keywords(self._plan.config.model.attention, self._device)

    def _own(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels of the tokens that this rank computes."""
        return labels if self._rows is None else self._rows.own(labels)


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Within this, compiled layers run as they are written."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
