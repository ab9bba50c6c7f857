"""The engine without pipeline stages: ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from harness.checkpoint.fragment import Fragment
from harness.data.batches import Batch
from harness.engine import fragments, state, swap
from harness.engine.api import Fill, Judge, Kinds, Scalars, StepResult
from harness.engine.deepspeed_0_19 import gradients, internals, settlements
from harness.engine.groups import Groups
from harness.errors import ExitCode, RunStopped
from harness.models.loss import forward
from harness.plan.plan import Plan


def poisoned(share: torch.Tensor) -> torch.Tensor:
    """The same loss; where it is not finite, its gradients are not either, so that the step is
    skipped. The host need not know.
    """
    return share * (1 + 0 * share.detach())


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Within this, compiled layers run as they are written."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


class ZeroEngine:
    """One DeepSpeed engine: accumulates, scales, clips and steps as its JSON says."""

    def __init__(self, engine: Any, plan: Plan, events: list[dict[str, Any]]) -> None:
        self.engine = engine
        self.plan = plan
        self.share = plan.share
        self.events = events  # what building it did that the user should know
        self.device: torch.device = engine.device
        self.groups = Groups(self.share, self._made_groups())
        self._averaged_over = self.groups.size("replicas")  # DeepSpeed's data-parallel ranks
        gradients.reduce_in_place(engine)

    def train_batch(
        self, batches: list[Batch], targets: int, lr: float, is_spike: Judge | None = None
    ) -> StepResult:
        """Take one optimizer step on this rank's micro-batches of a global batch.

        `targets`: target tokens of the whole global batch, over all ranks; a step without any is
        left out. `is_spike`: says, alike on all ranks, of this rank's part of the loss and the norm
        whether the step is left out, too.
        Raises RunStopped (diverged) when fp16's loss scale cannot fall any further.
        """
        loss_share = self.accumulate(batches, targets)
        if is_spike is None and targets:
            return StepResult(loss_share, self.apply(lr))
        norm = self.grad_norm()
        # Without a target there is no loss: weights would decay, moments fade, and routers learn
        # from the balancing loss alone.
        discard = not targets or (is_spike is not None and is_spike(loss_share, norm))
        applied = self.apply(lr, discard)
        return StepResult(loss_share, norm if discard else applied)

    def accumulate(self, batches: list[Batch], targets: int) -> torch.Tensor:
        """Forward and backward of all micro-batches; the gradients are then ready, not used."""
        self.engine.train()
        total = torch.zeros((), device=self.device)
        self._expect(len(batches))
        for batch in batches:
            # DeepSpeed would count micro-batches over all steps, which need not have equally many.
            self.engine.set_gradient_accumulation_boundary(batch is batches[-1])
            token_loss, auxiliary = self._forward(batch, self.plan.config.train.label_smoothing)
            share = token_loss / max(targets, 1)
            total += share.detach()
            if auxiliary is not None:
                share = share + auxiliary / (len(batches) * self.share.data_ranks)
            # DeepSpeed averages over the data ranks; the shares are to be summed. Its division by
            # the accumulation steps is off: micro-batches need not hold equally many targets.
            self.engine.backward(poisoned(share) * self._averaged_over, scale_wrt_gas=False)
            if batch is not batches[-1]:
                self.engine.step()  # not a boundary: counts the micro-step
        settlements.settle_gradients(self.engine)
        return total

    def apply(self, lr: float, discard: bool = False) -> float | torch.Tensor:
        """Clip and step with the accumulated gradients; returns the norm before clipping.

        Gradients that are not finite, on any rank, and those to `discard` (the same on all ranks)
        change neither weights nor moments: `step_applied` is False, `skipped_steps` one more.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        norm, limit = None, self.plan.config.optim.clip_value
        checks_nothing = gradients.keeps_no_grad_norm(self.engine)
        if limit is not None or checks_nothing:
            norm = self.grad_norm()
        if norm is not None and limit is not None:
            fragments.clip_by_value(self._held, limit * self.loss_scale, norm)
        if norm is not None and checks_nothing:
            # The host waits for this number: applied, NaN would be in every weight. The other
            # optimizers of DeepSpeed read their norm themselves.
            discard = discard or not math.isfinite(norm)
        try:
            with gradients.discarding(self.engine) if discard else contextlib.nullcontext():
                self._step()
        except Exception as error:
            if not settlements.is_minimum_loss_scale(error):
                raise
            with gradients.discarding(self.engine):
                self._step()  # which was left half done
            raise RunStopped(ExitCode.DIVERGED, self._loss_scale_diagnosis()) from error
        finally:
            settlements.drop_skipped_gradients(self.engine)
        settlements.gather_after_writing(self.engine)
        return self.engine.get_global_grad_norm() if norm is None else norm

    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients, between `accumulate` and `apply`. Collective."""
        norm = fragments.grad_norm(self._held, self._norm_group(), self.device)
        return norm / self.loss_scale

    def replicated(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) of what the ranks of `data_group` hold in common between steps."""
        return fragments.whole_weights(self._held)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that differ in their tokens alone, and have equal weights."""
        return self.groups.of("replicas")

    @torch.no_grad()
    def eval_batch(self, batches: list[Batch]) -> torch.Tensor:
        """(summed loss in nats, target tokens) of this rank's micro-batches, fp64, unreduced."""
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            sums[0] += self._forward(batch)[0]
            sums[1] += (batch.labels != -100).sum().to(self.device)
        return sums

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (vocab_size,) after the last of `input_ids` (1, tokens); same ids on all ranks.

        Those of rank 0 on all: ranks that choose another token next would part ways.
        """
        self.engine.eval()
        with _uncompiled(self.plan.config.model.compile):  # it would compile for many lengths
            output = self.engine(input_ids=input_ids.to(self.device), use_cache=False)
        logits: torch.Tensor = output.logits[0, -1].float()
        dist.broadcast(logits, 0)
        return logits

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data ranks, in place."""
        dist.all_reduce(values, group=self.groups.of("loss"))
        return values

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 gradient) of every parameter, between `accumulate` and `apply`."""
        return self._of_all_stages(fragments.full_gradients(self._held, self.loss_scale))

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 weight) of every parameter as the optimizer holds it."""
        return self._of_all_stages(fragments.full_masters(self._held))

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face model inside the engine."""
        model: PreTrainedModel = self.engine.module
        return model

    @property
    def loss_scale(self) -> float:
        """Factor of the loss before backward: 1 except in fp16."""
        return float(self.engine.optimizer.loss_scale) if self.engine.fp16_enabled() else 1.0

    @property
    def skipped_steps(self) -> int:
        """Steps not applied, since the start."""
        return int(self.engine.skipped_steps)

    @property
    def step_applied(self) -> bool:
        """True if the last step changed the weights; False after a skipped step."""
        return bool(self.engine.was_step_applied())

    def write_monitors(self, events: list[tuple[str, float, int]]) -> None:
        """Pass (name, value, samples) to the monitors that the JSON enables; rank 0 only."""
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(events)

    def describe(self) -> dict[str, Any]:
        """Return the classes that run on this rank, its ZeRO stage and its parameter elements."""
        optimizer = self.engine.optimizer
        inner = internals.inner_optimizer(self.engine)
        return {
            "engine": type(self.engine).__name__,
            "optimizer": type(optimizer).__name__,
            "inner_optimizer": type(inner).__name__,
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "elements_held": fragments.elements_held(self._held),
        }

    def close(self) -> None:
        """Let DeepSpeed give back its hooks and buffers; the engine is unusable afterwards."""
        swap.remove_files(self.engine)
        self.engine.destroy()

    def fragments(self) -> list[Fragment]:
        """Return this rank's fragments of weights and optimizer states, as views of live memory."""
        return state.fragments(self.engine, self._held, self.share)

    def restore(self, fill: Fill, kinds: Kinds) -> None:
        """Fill weights, and their `kinds` of optimizer state, from where they are.

        Raises what `fill` raises, on this rank alone. Once it raised on none, `refresh_weights`.
        """
        state.restore(self.engine, self._held, fill, kinds)

    def refresh_weights(self) -> None:
        """Compute with what `restore` has filled; collective."""
        state.refresh_weights(self.engine)
        settlements.gather_after_writing(self.engine)

    def scalars(self) -> Scalars:
        """Counters, loss scaling and the optimizer's steps; the same on all ranks."""
        return state.scalars(self.engine)

    def restore_scalars(self, saved: Scalars) -> None:
        """Set what `scalars` gave; after `restore`."""
        state.restore_scalars(self.engine, saved)

    def _forward(
        self, batch: Batch, smoothing: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of one micro-batch, copied to the device while the last one still computes."""
        return forward(self.engine, *batch.on(self.device), smoothing)

    @property
    def _held(self) -> torch.nn.Module:
        """The part of the model whose weights this rank has, or has its shares of."""
        return self.module

    def _of_all_stages(
        self, own: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the ranks that hold the rest of the model, too."""
        return own

    def _expect(self, micro_batches: int) -> None:
        """Tell DeepSpeed how many micro-batches the next step has, at most those of its JSON."""
        if micro_batches != self.engine.gradient_accumulation_steps():
            samples = micro_batches * self.plan.micro_batch * self._averaged_over
            self.engine.set_train_batch_size(samples)

    def _step(self) -> None:
        self.engine.step()

    def _made_groups(self) -> list[dist.ProcessGroup]:
        """The groups of some ranks that DeepSpeed has made."""
        return []

    def _norm_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients together are all gradients, each once; None for this alone."""
        if not gradients.keeps_no_grad_norm(self.engine):
            return self.groups.of("norm")
        return self.groups.of("model") if self.groups.size("model") > 1 else None

    def _loss_scale_diagnosis(self) -> str:
        fp16 = self.plan.deepspeed["fp16"]
        return (
            f"the fp16 loss scale fell to its minimum ({fp16.get('min_loss_scale', 1)}) and the "
            f"gradients still overflow: {self.skipped_steps} steps were skipped. The model has "
            "diverged: lower optim.lr or raise optim.warmup_steps, or train in bf16"
        )
