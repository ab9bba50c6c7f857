"""The engine without pipeline stages: ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from harness.checkpoint.index import Fragment
from harness.data.batch import Batch
from harness.engine import fragments, skip, state, swap
from harness.engine.api import Fill, Judge, Kinds, Replica, Scalars, StepResult
from harness.engine.deepspeed_0_19 import gradients, internals
from harness.engine.expert import Experts
from harness.engine.forward import ForwardPass
from harness.engine.fragments import assembled, part_of
from harness.engine.groups import Groups, ModelParallelUnit, gradients_apart
from harness.layout.box import Part
from harness.layout.grid import Purpose
from harness.models.by_source import recording
from harness.plan.plan import Plan


class ZeroEngine:
    """One DeepSpeed engine: accumulates, scales, clips and steps as its JSON says."""

    def __init__(
        self,
        engine: Any,
        plan: Plan,
        events: list[dict[str, Any]],
        unit: ModelParallelUnit | None = None,
        experts: Experts | None = None,
        row_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`row_group`: the ranks that have a part of each row of this one's."""
        self._unit, self._experts, self._row_group = unit, experts, row_group
        self.engine = engine
        self.plan = plan
        self.share = plan.share
        self.events = events  # what building it did that the user should know
        self.make_undivided: Callable[[], PreTrainedModel] = lambda: self.module
        self.device: torch.device = engine.device
        self.groups = Groups(self.share, self._made_groups())
        self._averaged_over = self.groups.size("replicas")  # DeepSpeed's data-parallel ranks
        self.forward = ForwardPass(engine, plan, row_group)
        gradients.reduce_in_place(engine)
        self.source_sums: torch.Tensor | None = None
        """Summed training loss of each source of a mixture; None: not wanted."""

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
        skips = skip.is_unwanted(targets, loss_share, norm, is_spike)
        applied = self.apply(lr, skips)
        return StepResult(loss_share, norm if skips else applied)

    def accumulate(self, batches: list[Batch], targets: int) -> torch.Tensor:
        """Forward and backward of all micro-batches; the gradients are then ready, not used."""
        if not self.engine.module.training:  # train() visits every module
            self.engine.train()
        total = torch.zeros((), device=self.device)
        self._expect(len(batches))
        for number, batch in enumerate(batches):
            # DeepSpeed would count micro-batches over all steps, which need not have equally many.
            self.engine.set_gradient_accumulation_boundary(batch is batches[-1])
            with recording(self.source_sums, batch.sources_on(self.device)):
                token_loss, auxiliary = self.forward.in_training(number, batch)
            share = token_loss / max(targets, 1)
            total += share.detach()
            if auxiliary is not None:
                share = share + auxiliary / (len(batches) * self.share.data_ranks)
            # DeepSpeed averages over the data ranks; the shares are to be summed. Its division by
            # the accumulation steps is off: micro-batches need not hold equally many targets.
            self.engine.backward(skip.poisoned(share) * self._averaged_over, scale_wrt_gas=False)
            if batch is not batches[-1]:
                self.engine.step()  # not a boundary: counts the micro-step
        gradients.settle_gradients(self.engine)
        return total

    def apply(self, lr: float, skips: bool = False) -> float | torch.Tensor:
        """Clip and step with the accumulated gradients; returns the norm before clipping.

        A step that `skips` (the same on all ranks), or whose gradients are not finite on any rank,
        changes neither weights nor moments: `step_applied` is False, `skipped_steps` one more.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        norm, limit = None, self.plan.config.optim.clip_value
        if limit is not None or gradients.keeps_no_grad_norm(self.engine):
            norm = self.grad_norm()
            skips = skips or skip.is_spoiled(self.engine, norm)
        if norm is not None and limit is not None:
            fragments.clip_by_value(self._held, limit * self.loss_scale, norm)
        skip.step_or_skip(self.engine, self._step, skips)
        gradients.gather_after_writing(self.engine)
        return self.engine.get_global_grad_norm() if norm is None else norm

    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients, between `accumulate` and `apply`. Collective."""
        norm = fragments.grad_norm(self._held, self._norm_group(), self.device)
        return norm / self.loss_scale

    def gradients_apart(self) -> dict[str, float]:
        """Relative differences of undivided gradients over tensor-parallel ranks. Collective."""
        if self.groups.size("tensor") == 1:
            return {}
        return gradients_apart(self._held, self.groups.of("tensor"), self.device)

    def replicated(self) -> Iterator[Replica]:
        """Yield the weights that this rank and others of its stage hold alike between steps: under
        ZeRO-3 whole weights below `stage3_param_persistence_threshold`, and tensor-parallel ranks'
        shards.
        """
        peers = self.share.ranks("tensor")
        for name, parameter, tensor in fragments.weights_here(self._held):
            ranks = self.share.alike(name, part_of(parameter).whole)
            if not internals.is_whole(parameter):  # other data ranks have other shards
                ranks = tuple(rank for rank in ranks if rank in peers)
            if len(ranks) > 1:
                yield Replica(name, tensor, ranks, part_of(parameter).is_whole)

    def tied(self) -> list[tuple[str, torch.Tensor, dist.ProcessGroup]]:
        """(name, weight, the ranks that have it) of what another stage holds, too."""
        return []

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that differ in their tokens alone, and have equal weights."""
        return self.groups.of("replicas")

    def group_of(self, purpose: Purpose) -> dist.ProcessGroup:
        """This rank's group for a purpose. KeyError where the layout has no use for it."""
        return self.groups.of(purpose)

    @torch.no_grad()
    def eval_batch(
        self, batches: list[Batch], by_position: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(summed loss in nats, target tokens) of this rank's micro-batches, fp64, unreduced; the
        same by how much a token sees, added to `by_position` (buckets, 2). With
        train.carry_state, states are carried from one micro-batch to the next, also of another
        call.
        """
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            with self.forward.by_position(batch, by_position):
                sums[0] += self.forward.in_evaluation(batch)
            sums[1] += self.forward.targets(batch)
        return sums

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (vocab_size,) after the last of `input_ids` (1, tokens); same ids on all ranks.

        Those of rank 0 on all: ranks that choose another token next would part ways.
        """
        self.engine.eval()
        logits = self.forward.last_logits(input_ids)
        if vocabulary := getattr(self.module, "vocabulary", None):
            logits = vocabulary.all_logits(logits)
        dist.broadcast(logits, 0)
        return logits

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data ranks, in place."""
        dist.all_reduce(values, group=self.groups.of("loss"))
        return values

    def expert_tokens(self) -> torch.Tensor | None:
        """(layers, experts) int64: tokens sent to each expert since the last call, by all ranks."""
        return None if self._experts is None else self._experts.tokens()

    def count_sources(self, sources: int) -> None:
        """Sum the training loss of each source of a mixture from here on."""
        self.source_sums = torch.zeros(sources, dtype=torch.float64, device=self.device)

    def source_losses(self) -> torch.Tensor | None:
        """(sources,) fp64: summed training loss of each source since the last call, of all ranks;
        None if it is not counted. Collective.
        """
        if self.source_sums is None:
            return None
        sums = self.sum_over_ranks(self.source_sums.clone())
        self.source_sums.zero_()
        return sums

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 gradient) of every parameter, between `accumulate` and `apply`."""
        return self._of_all_ranks(fragments.full_gradients(self._held, self.loss_scale))

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 weight) of every parameter as the optimizer holds it."""
        return self._of_all_ranks(fragments.full_masters(self._held))

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face model inside the engine."""
        model: PreTrainedModel = self.engine.module
        return model

    def undivided(self) -> PreTrainedModel:
        """Return the model of which tensor-parallel ranks have parts, without weights."""
        return self.make_undivided()

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

    def fragments(self, states: bool = True) -> list[Fragment]:
        """Return this rank's fragments of weights and optimizer states, as views of live memory;
        without `states` weights alone.
        """
        if not states:
            return state.weights(self.engine, self._held, self.share)
        carried = self.forward.carried
        own = carried.fragments() if carried else []
        return [*state.fragments(self.engine, self._held, self.share), *own]

    def restore(self, fill: Fill, kinds: Kinds) -> None:
        """Fill weights, and their `kinds` of optimizer state, from where they are.

        Raises what `fill` raises, on this rank alone. Once it raised on none, `refresh_weights`.
        """
        state.restore(self.engine, self._held, fill, kinds)
        if self.forward.carried:
            self.forward.carried.restore(fill, kinds)

    def refresh_weights(self) -> None:
        """Compute with what `restore` has filled; collective."""
        state.refresh_weights(self.engine)
        gradients.gather_after_writing(self.engine)

    def scalars(self) -> Scalars:
        """Counters, loss scaling and the optimizer's steps; the same on all ranks."""
        return state.scalars(self.engine)

    def restore_scalars(self, saved: Scalars) -> None:
        """Set what `scalars` gave; after `restore`."""
        state.restore_scalars(self.engine, saved)

    @property
    def _held(self) -> torch.nn.Module:
        """The part of the model whose weights this rank has, or has its shares of."""
        return self.module

    def _of_all_ranks(
        self, own: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, those of the ranks that hold the rest of the model, too."""
        purpose: Purpose = "expert_parts" if self._experts else "tensor"
        if self.groups.size(purpose) == 1:
            return own
        peers = [replace(self.share, rank=rank) for rank in self.share.ranks(purpose)]

        def parts_of(name: str) -> list[Part]:
            whole = self._whole_shape(name)
            return [peer.part(name, whole) for peer in peers]

        return assembled(own, parts_of, self.groups.of(purpose), self.device)

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        """The shape of all of a parameter of the model."""
        return part_of(self._held.get_parameter(name)).whole

    def _expect(self, micro_batches: int) -> None:
        """Tell DeepSpeed how many micro-batches the next step has, at most those of its JSON."""
        if micro_batches != self.engine.gradient_accumulation_steps():
            samples = micro_batches * self.plan.micro_batch * self._averaged_over
            self.engine.set_train_batch_size(samples)

    def _step(self) -> None:
        self.engine.step()

    def _made_groups(self) -> list[dist.ProcessGroup]:
        """The groups of some ranks that have been made."""
        unit, experts = self._unit, self._experts
        made = [unit.tensor_group, unit.data_group] if unit else []
        made += [experts.parts, experts.group, experts.replicas] if experts else []
        return [*made, *([self._row_group] if self._row_group else [])]

    def _norm_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients together are all gradients, each once; None for this alone."""
        if not gradients.keeps_no_grad_norm(self.engine):
            return self.groups.of("norm")
        return self.groups.of("model") if self.groups.size("model") > 1 else None
