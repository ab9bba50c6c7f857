"""The engine without pipeline stages: ZeRO 0 to 3."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from harness.checkpoint.tensor_file import Fragment
from harness.config.own import ROWS
from harness.data.batch import Batch
from harness.engine import fragments, state, stepping, swap
from harness.engine.api import ByGroup, Engine, Fill, Kinds, Replica, Scalars, StepResult
from harness.engine.deepspeed_0_19 import between_steps, gradients, internals
from harness.engine.expert import Experts
from harness.engine.forward import ForwardPass
from harness.engine.fragments import assembled, part_of
from harness.engine.groups import Groups, gradients_apart
from harness.guard.skip import SkipRule
from harness.layout.box import Part
from harness.layout.grid import Purpose
from harness.models.loss import LossSetup
from harness.models.token_losses import recording
from harness.plan.plan import Plan


class ZeroEngine(Engine):
    """A DeepSpeed engine that accumulates, scales, clips and steps as configured in its JSON."""

    def __init__(
        self,
        engine: Any,
        plan: Plan,
        events: list[dict[str, Any]],
        setup: LossSetup,
        made: Iterable[dist.ProcessGroup | None] = (),
        experts: Experts | None = None,
    ) -> None:
        """`made`: the process groups that were created for this engine."""
        self.engine, self.setup, self._experts = engine, setup, experts
        self.plan = plan
        self.share = plan.share
        self.events = events  # what was changed while building; written to events.jsonl
        self.make_undivided: Callable[[], PreTrainedModel] = lambda: self.module
        self.device: torch.device = engine.device
        self.groups = Groups(self.share, made)
        self._averaged_over = self.groups.size("replicas")  # DeepSpeed's data-parallel ranks
        self.forward = ForwardPass(engine, plan, setup)
        gradients.reduce_in_place(engine)
        between_steps.sum_at_once(engine)
        between_steps.take_norm_at_once(engine)
        between_steps.step_where_sums_lie(engine)
        self.source_sums: torch.Tensor | None = None
        """Summed training loss of each source of a mixture; None if it is not counted."""

    def train_batch(
        self, batches: list[Batch], targets: int, lr: float, skip_rule: SkipRule | None = None
    ) -> StepResult:
        """Take one optimizer step on this rank's micro-batches of a global batch.

        `targets`: target tokens of the global batch, over all ranks; without any, the step is
        skipped. Raises RunStopped (diverged) if fp16's loss scale is already at its minimum.
        """
        loss_share = self.accumulate(batches, targets)
        if skip_rule is None and targets:
            return StepResult(loss_share, self.apply(lr))
        norm = self.grad_norm()
        # Without targets there is no loss, but weights would decay, moments fade, and routers learn
        # from the balancing loss alone.
        skips = not targets or (skip_rule is not None and skip_rule(loss_share, norm))
        applied = self.apply(lr, skips)
        return StepResult(loss_share, norm if skips else applied)

    def accumulate(self, batches: list[Batch], targets: int) -> torch.Tensor:
        """Run forward and backward passes of all micro-batches; apply no gradients."""
        if not self.engine.module.training:  # train() visits every module
            self.engine.train()
        total = torch.zeros((), device=self.device)
        self._expect(len(batches))
        for number, batch in enumerate(batches):
            # DeepSpeed counts micro-batches across steps, but their number may vary between steps.
            self.engine.set_gradient_accumulation_boundary(batch is batches[-1])
            with recording(self.source_sums, batch.sources_on(self.device)):
                token_loss, auxiliary = self.forward.in_training(number, batch)
            share = token_loss / max(targets, 1)
            total += share.detach()
            if auxiliary is not None:
                share = share + auxiliary / (len(batches) * self.share.data_ranks)
            # DeepSpeed averages over the data ranks, but the shares must be summed. Its division by
            # the accumulation steps is off, because micro-batches may have different numbers of
            # targets.
            self.engine.backward(
                stepping.propagate_nonfinite(share) * self._averaged_over, scale_wrt_gas=False
            )
            if batch is not batches[-1]:
                self.engine.step()  # not a boundary: counts the micro-step
        gradients.settle_gradients(self.engine)
        return total

    def apply(self, lr: float, skips: bool = False) -> float | torch.Tensor:
        """Clip and step with the accumulated gradients; return the norm before clipping.

        If `skips` (equal on all ranks), or if gradients are not finite on any rank, neither weights
        nor moments change: `step_applied` is False and `skipped_steps` is incremented.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        norm, limit = None, self.plan.config.optim.clip_value
        if limit is not None or gradients.keeps_no_grad_norm(self.engine):
            norm = self.grad_norm()
            skips = skips or stepping.has_nonfinite_grads(self.engine, norm)
        if norm is not None and limit is not None:
            fragments.clip_by_value(self._own_module, limit * self.loss_scale, norm)
        stepping.step_or_skip(self.engine, self._step, skips)
        gradients.gather_after_writing(self.engine)
        return self.engine.get_global_grad_norm() if norm is None else norm

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of all gradients, between `accumulate` and `apply`. Collective."""
        norm = fragments.grad_norm(self._own_module, self._norm_group(), self.device)
        return norm / self.loss_scale

    def gradients_apart(self) -> dict[str, float]:
        """Return how far gradients of unsliced parameters differ over tensor ranks. Collective."""
        if self.groups.size("tensor") == 1:
            return {}
        return gradients_apart(self._own_module, self.groups.of("tensor"), self.device)

    def replicated(self) -> Iterator[Replica]:
        """Yield the elements that ranks of a stage hold in common, in the same order on all."""
        # Under ZeRO-3: weights below stage3_param_persistence_threshold, and the shards that
        # tensor-parallel ranks have in common.
        peers = self.share.ranks("tensor")
        for name, parameter, tensor in fragments.stored_weights(self._own_module):
            ranks = self.share.alike(name, part_of(parameter).whole)
            if not internals.is_whole(parameter):  # other data ranks have other shards
                ranks = tuple(rank for rank in ranks if rank in peers)
            if len(ranks) > 1:
                among = tuple(rank for rank in ranks if rank in peers)
                yield Replica(name, tensor, ranks, self.groups.among(among))

    def tied(self) -> list[tuple[str, torch.Tensor, dist.ProcessGroup]]:
        """Return (name, weight, group) of each weight that another stage holds too."""
        return []

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that differ only in their tokens and have equal weights."""
        return self.groups.of("replicas")

    def group_of(self, purpose: Purpose) -> dist.ProcessGroup:
        """Return this rank's group for a purpose. Raises KeyError if the layout does not use it."""
        return self.groups.of(purpose)

    @torch.no_grad()
    def eval_batch(self, batches: list[Batch], by_group: ByGroup | None = None) -> torch.Tensor:
        """Return (summed loss, targets: tokens or pairs) of these micro-batches, fp64, unreduced;
        zeros on all pipeline stages but the last. Also add the nats and target tokens of groups.

        With recurrent state carried over, contiguous text (Batch.windows) must come in call order.
        """
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            with self.forward.by_group(batch, by_group):
                sums[0] += self.forward.in_evaluation(batch)
            sums[1] += self.forward.targets(batch)
        return sums

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (vocab_size,) after the last token of `input_ids` (1, tokens), both
        the same on all ranks.
        """
        self.engine.eval()
        logits = self.forward.last_logits(input_ids)
        if self.setup.vocabulary is not None:
            logits = self.setup.vocabulary.all_logits(logits)
        dist.broadcast(logits, 0)  # ranks that chose different tokens would diverge
        return logits

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data-parallel ranks, in place."""
        dist.all_reduce(values, group=self.groups.of("loss"))
        return values

    def expert_tokens(self) -> torch.Tensor | None:
        """Return (layers, experts) int64 on this rank's device: training tokens that all ranks'
        routers sent to each expert since the last call. None without expert parallelism.
        Collective.
        """
        return None if self._experts is None else self._experts.tokens()

    def count_sources(self, sources: int) -> None:
        """Start summing the training loss of each source of a mixture."""
        self.source_sums = torch.zeros(sources, dtype=torch.float64, device=self.device)

    def source_losses(self) -> torch.Tensor | None:
        """Return (sources,) fp64: the training loss of each source summed over all ranks since the
        last call; None if sources are not counted. Collective.
        """
        if self.source_sums is None:
            return None
        sums = self.sum_over_ranks(self.source_sums.clone())
        self.source_sums.zero_()
        return sums

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, fp32 gradient) of every parameter, before `apply`. Collective."""
        return self._of_all_ranks(fragments.full_gradients(self._own_module, self.loss_scale))

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, fp32 master weight) of every parameter. Collective."""
        return self._of_all_ranks(fragments.full_masters(self._own_module))

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face model; with pipeline stages, the whole model without its weights."""
        model: PreTrainedModel = self.engine.module
        return model

    def undivided(self) -> PreTrainedModel:
        """Return the full model of which ranks hold slices or stages, without weights."""
        return self.make_undivided()

    @property
    def loss_scale(self) -> float:
        """Factor by which the loss is multiplied before the backward pass; 1 except in fp16."""
        return float(self.engine.optimizer.loss_scale) if self.engine.fp16_enabled() else 1.0

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped since the start."""
        return int(self.engine.skipped_steps)

    @property
    def step_applied(self) -> bool:
        """False after a step that was skipped and changed nothing."""
        return bool(self.engine.was_step_applied())

    def write_monitors(self, events: list[tuple[str, float, int]]) -> None:
        """Pass (name, value, samples) to the monitors enabled in the JSON; rank 0 only."""
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(events)

    def describe(self) -> dict[str, Any]:
        """Return the classes, the ZeRO stage and the number of elements actually on this rank.

        Raises ConfigError for states of an optimizer of run.code that no checkpoint would hold.
        """
        if ("optimizer", self.plan.config.optim.name) in ROWS:
            state.check_states(self.engine)
        optimizer = self.engine.optimizer
        inner = internals.inner_optimizer(self.engine)
        return {
            "engine": type(self.engine).__name__,
            "optimizer": type(optimizer).__name__,
            "inner_optimizer": type(inner).__name__,
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "elements_held": sum(map(internals.elements_held, self._own_module.parameters())),
        }

    def close(self) -> None:
        """Release hooks, buffers and files; the engine is unusable afterwards."""
        swap.remove_files(self.engine)
        self.engine.destroy()

    def fragments(self, states: bool = True) -> list[Fragment]:
        """Return the fragments that this rank saves, as views of live memory; the ranks together
        hold every element once. Without `states`, weights only: no optimizer state, no recurrent
        state.
        """
        saved = state.fragments(self.engine, self._own_module, self.share, states)
        if states and self.forward.carried:
            saved += self.forward.carried.fragments()
        return saved

    def restore(self, fill: Fill, kinds: Kinds) -> None:
        """Fill weights, the `kinds` of optimizer state and the recurrent state of each row. Not
        collective; may raise on one rank only.

        If no rank raised, call `refresh_weights` next.
        """
        state.restore(self.engine, self._own_module, fill, kinds)
        if self.forward.carried:
            self.forward.carried.restore(fill, kinds)

    def refresh_weights(self) -> None:
        """Update the weights used for computing from those that `restore` filled. Collective."""
        state.refresh_weights(self.engine)
        gradients.gather_after_writing(self.engine)

    def scalars(self) -> Scalars:
        """Return counters, loss scaling and the optimizer's step count; equal on all ranks."""
        return state.scalars(self.engine)

    def restore_scalars(self, saved: Scalars) -> None:
        """Restore the values returned by `scalars`; call it after `restore`."""
        state.restore_scalars(self.engine, saved)

    @property
    def _own_module(self) -> torch.nn.Module:
        """The part of the model whose weights this rank holds, in full or as shards."""
        return self.module

    def _of_all_ranks(
        self, own: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor), assembled from the slices of all ranks. Collective."""
        purpose: Purpose = "expert_parts" if self._experts else "tensor"
        if self.groups.size(purpose) == 1:
            return own
        peers = [replace(self.share, rank=rank) for rank in self.share.ranks(purpose)]

        def parts_of(name: str) -> list[Part]:
            whole = self._whole_shape(name)
            return [peer.part(name, whole) for peer in peers]

        return assembled(own, parts_of, self.groups.of(purpose), self.device)

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a parameter."""
        return part_of(self._own_module.get_parameter(name)).whole

    def _expect(self, micro_batches: int) -> None:
        """Tell DeepSpeed the number of micro-batches of the next step, at most its JSON's."""
        if micro_batches != self.engine.gradient_accumulation_steps():
            samples = micro_batches * self.plan.micro_batch * self._averaged_over
            self.engine.set_train_batch_size(samples)

    def _step(self) -> None:
        self.engine.step()

    def _norm_group(self) -> dist.ProcessGroup | None:
        """Return the group over which every gradient counts once; None if this rank has all."""
        if not gradients.keeps_no_grad_norm(self.engine):
            return self.groups.of("norm")
        return self.groups.of("model") if self.groups.size("model") > 1 else None
