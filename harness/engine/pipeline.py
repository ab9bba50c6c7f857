"""The engine with pipeline stages: DeepSpeed's 1F1B schedule."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeSchedule
from torch import nn
from transformers import PreTrainedModel

from harness.data.batch import Batch, on_device
from harness.engine.api import ByGroup
from harness.engine.deepspeed_0_19 import gradients, internals
from harness.engine.forward import pairs_of
from harness.engine.fragments import is_copy
from harness.engine.stepping import propagate_nonfinite
from harness.engine.zero import ZeroEngine
from harness.models.loss import LossSetup, losses
from harness.models.stage import Stage
from harness.models.token_losses import recording
from harness.plan.plan import Plan


class PipelineEngine(ZeroEngine):
    """A DeepSpeed pipeline engine, split into accumulation and step like the ZeRO engine."""

    def __init__(
        self,
        engine: Any,
        plan: Plan,
        events: list[dict[str, Any]],
        setup: LossSetup,
        made: Iterable[dist.ProcessGroup | None],
        stage: Stage,
        whole: PreTrainedModel,
    ) -> None:
        super().__init__(engine, plan, events, setup, made)
        self.stage = stage
        stage.gets_padding = setup.gets_padding
        self._tied = engine.module.get_tied_weights_and_groups()
        self._whole = whole
        self._sent: tuple[int, ...] = ()  # shape, and if with positions, of the last inputs
        self._column = plan.grid.group("pipeline", plan.world.rank)
        self._column_group = internals.pipe_group(engine)
        if gradients.keeps_no_grad_norm(engine):
            gradients.count_every_stage(stage.parameters(), is_copy)
        gradients.add_norms_over_stages_once(engine)
        gradients.average_tied_gradients_first(engine)

    def tied(self) -> list[tuple[str, torch.Tensor, dist.ProcessGroup]]:
        return [(weight.tied_to, weight.detach(), group) for weight, group in self._tied]

    @property
    def module(self) -> PreTrainedModel:
        return self._whole

    def accumulate(self, batches: list[Batch], targets: int) -> torch.Tensor:
        """Run the schedule of all micro-batches; apply no gradients."""
        if not self.engine.module.training:  # train() visits every module
            self.engine.module.train()
        total = torch.zeros((), device=self.device)
        labels, data_ranks = self._labels(batches), self.share.data_ranks
        sources = (batch.sources_on(self.device) for batch in batches)
        model, smoothing = self.stage.model, self.plan.config.train.label_smoothing
        pairs = (pairs_of(batch, self.device) for batch in batches)

        def finish(run: Callable[[], Any]) -> torch.Tensor:
            with recording(self.source_sums, next(sources)):
                arguments = (next(labels), self.setup, smoothing, next(pairs))
                token_loss, auxiliary = losses(model, run, *arguments)
            share = token_loss / max(targets, 1)
            total.add_(share.detach())
            if auxiliary is not None:
                share = share + auxiliary / (len(batches) * data_ranks)
            # DeepSpeed averages over data ranks and micro-batches, but the shares must be summed.
            return propagate_nonfinite(share) * (self._averaged_over * len(batches))

        self._expect(len(batches))
        self._run(_WithoutStep(internals.train_schedule(self.engine)), batches, finish)
        gradients.settle_gradients(self.engine)
        return total

    @torch.no_grad()
    def eval_batch(self, batches: list[Batch], by_group: ByGroup | None = None) -> torch.Tensor:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        labels, of_batch = self._labels(batches), iter(batches)

        def finish(run: Callable[[], Any]) -> torch.Tensor:
            wanted, batch = next(labels), next(of_batch)
            pairs = pairs_of(batch, self.device)
            with self.forward.by_group(batch, by_group):
                how = self.setup.in_evaluation, 0.0, pairs
                loss = losses(self.stage.model, run, wanted, *how)[0]
            sums[0] += loss
            sums[1] += self.forward.targets(batch)
            return loss

        self.engine.module.eval()
        self._run(internals.inference_schedule(self.engine, len(batches)), batches, finish)
        return sums

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        vocab_size, _ = self._whole.get_output_embeddings().weight.shape
        logits = torch.empty(vocab_size, device=self.device)

        def finish(run: Callable[[], Any]) -> torch.Tensor:
            last = run().logits[0, -1]
            if self.setup.vocabulary is not None:
                last = self.setup.vocabulary.all_logits(last)
            return logits.copy_(last)

        self.engine.module.eval()
        schedule = internals.inference_schedule(self.engine, 1)
        self._run(schedule, [Batch(input_ids, input_ids, None)], finish)
        dist.broadcast(logits, self.plan.grid.group("pipeline", 0)[-1])
        return logits

    def describe(self) -> dict[str, Any]:
        place = self.plan.grid.coords(self.plan.world.rank).pipeline
        return {**super().describe(), "pipeline_stage": place}

    @property
    def _own_module(self) -> nn.Module:
        return self.stage.model

    def _run(self, schedule: Any, batches: list[Batch], finish: Any) -> None:
        # DeepSpeed negotiates only once how many tensors of which shapes the stages send.
        if batches:
            sent = (*batches[0].input_ids.shape, batches[0].position_ids is not None)
            if sent != self._sent:
                internals.forget_shape(self.engine)
                self._sent = sent
        self.stage.finish = finish
        self.stage.keywords = (self.forward.keywords(batch) for batch in batches)
        internals.run_schedule(self.engine, schedule, (self._inputs(batch) for batch in batches))

    def _step(self) -> None:
        internals.take_step(self.engine)

    def _inputs(self, batch: Batch) -> Any:
        """Return the first stage's inputs on the device; DeepSpeed's own copy would block."""
        if not self.engine.is_first_stage():
            return None
        tensors = (batch.input_ids, batch.position_ids)
        moved = [on_device(t, self.device) for t in tensors if t is not None]
        return moved[0] if len(moved) == 1 else tuple(moved)

    def _labels(self, batches: list[Batch]) -> Iterator[torch.Tensor]:
        """Return the labels on the device; the last stage consumes them in order."""
        return (on_device(batch.labels, self.device) for batch in batches)

    def _of_all_ranks(
        self, own: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of all ranks, on every stage, one tensor at a time, on the CPU."""
        return super()._of_all_ranks(self._of_all_stages(own))

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._whole.get_parameter(name).shape)

    def _of_all_stages(
        self, own: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for owner in self._column:
            while True:
                item = next(own, None) if owner == self.plan.world.rank else None
                header = [item and (item[0], item[1].shape, item[1].dtype)]
                dist.broadcast_object_list(header, owner, group=self._column_group)
                if header[0] is None:
                    break
                name, shape, dtype = header[0]
                tensor = item[1] if item else torch.empty(shape, dtype=dtype)
                moved = tensor.to(self.device).contiguous()
                dist.broadcast(moved.view(torch.uint8), owner, group=self._column_group)
                yield name, moved.cpu()


class _WithoutStep:
    """A training schedule without its optimizer step, which is taken separately."""

    def __init__(self, schedule: PipeSchedule) -> None:
        self.schedule = schedule

    def num_pipe_buffers(self) -> int:
        return int(self.schedule.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        for commands in self.schedule:
            yield [command for command in commands if not isinstance(command, OptimizerStep)]
