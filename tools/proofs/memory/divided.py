"""DeepSpeed by itself with tensors or sequences divided over the ranks, which the harness refuses.

For what it holds, not for what it learns: docs/deepspeed_findings.md, 14 to 20.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers import AutoModelForCausalLM

from harness.data.batches import Batch
from harness.layout.division import divides_vocabulary
from harness.layout.optimizer_table import optimizer_groups
from harness.models.loss import forward
from harness.models.skeleton import DTYPES, described_parameters, hf_config
from harness.plan.plan import Plan
from tools.memory.saved import saved_by


class DividedEngine:
    """As much of ZeroEngine as is measured."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.saved = 0
        """Bytes that autograd kept for the last backward pass, weights left out."""
        self.model: nn.Module = AutoModelForCausalLM.from_config(
            hf_config(plan.model_config),
            dtype=DTYPES[plan.precision],
            attn_implementation=plan.config.model.attention,
        )
        shape = plan.shape
        self._own_loss = plan.grid.tensor > 1 and shape is not None and divides_vocabulary(shape)
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=_groups(self.model),
            config=plan.deepspeed,
            mpu=self._sequence_groups(),
        )

    def _sequence_groups(self) -> Any:
        """What Ulysses hands to DeepSpeed; it replaces attention once for a process."""
        if self.plan.grid.sequence == 1:
            return None
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            UlyssesSPAttentionHF.register_with_transformers(
                self.model,
                self.plan.config.model.attention,
                self.plan.grid.sequence,
                micro_batch_size=self.plan.micro_batch,
            )
        return parallel_state_sp

    def accumulate(self, batches: list[Batch], _targets: int) -> None:
        """Forward and backward of all micro-batches, each divided between the ranks."""
        self.engine.train()
        for batch in batches:
            self.engine.set_gradient_accumulation_boundary(batch is batches[-1])
            self.engine.backward(self._forward(batch))
            if batch is not batches[-1]:
                self.engine.step()

    def _forward(self, batch: Batch) -> torch.Tensor:
        grid = self.plan.grid
        here = grid.coords(self.plan.world.rank).sequence
        length = batch.input_ids.shape[1] // grid.sequence
        part = slice(here * length, (here + 1) * length)
        ids, labels = batch.input_ids[:, part], batch.labels[:, part]
        positions = torch.arange(part.start, part.stop)[None] if grid.sequence > 1 else None
        with saved_by(self.model) as saved:
            if self._own_loss:  # of logits that are divided, too
                given = {"input_ids": ids, "labels": labels, "shift_labels": labels}
                loss = self.engine(**given, use_cache=False).loss
            else:
                loss = forward(self.engine, ids, labels, positions)[0] / labels.numel()
        self.saved = saved.bytes
        return loss

    def apply(self, _lr: float) -> None:
        """An optimizer step."""
        self.engine.step()

    def describe(self) -> dict[str, str]:
        """The class that steps."""
        return {"optimizer": type(self.engine.optimizer).__name__}

    def close(self) -> None:
        """Free what can be freed, and DeepSpeed's global state."""
        self.engine.destroy()
        deepspeed.utils.groups.mpu = None


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """The harness's own groups."""
    held = dict(model.named_parameters())
    found = optimizer_groups(described_parameters(model), 0.1, (), False)
    return [{"params": [held[name] for name in names]} for _, names in found]
