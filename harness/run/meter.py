"""Measures the values of a metrics.jsonl line: rates, losses by source, expert load, weights."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.index import WEIGHT
from harness.config.ds_json import offloaded_to
from harness.data.batch import on_device
from harness.data.batches import Stream
from harness.data.padded import Padded
from harness.engine.api import Engine
from harness.estimate.hardware import known_gpu
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.step import TERMS, StepTime
from harness.layout.attention_table import seen_by
from harness.layout.shape import Shape, flops_per_token
from harness.plan.duration import step_time
from harness.plan.plan import Plan
from harness.run.instrument import Instrument
from harness.steps import Step


class Meter:
    """Times steps and turns their results into one metrics line."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._peak_flops = _peak_flops(plan)
        self.restart()

    def restart(self) -> None:
        """Start measuring again, so that an evaluation or a save is not part of the step time."""
        self._since = time.perf_counter()
        self._steps = self._tokens = self._positions = 0
        self._flops = self._waited_s = 0.0

    def step_done(self, step: Step) -> None:
        """Count one optimizer step."""
        reads = step.reads
        self._steps += 1
        self._tokens += step.tokens
        self._positions += step.positions
        self._waited_s += step.waited_s
        if self._peak_flops and self.plan.shape:
            mean_length = step.tokens // (reads.global_batch * reads.pieces)
            self._flops += step.tokens * self._flops_per_token(self.plan.shape, mean_length)
        self._last = reads

    def _flops_per_token(self, shape: Shape, seq_len: int) -> float:
        model = self.plan.config.model
        adapters = model.lora.adapters
        count = adapters.flops_per_token if adapters else flops_per_token
        return count(shape, seq_len, seen_by(model.attention, model.attention_sizes))

    def line(
        self,
        loss: torch.Tensor,
        grad_norm: float | torch.Tensor,
        targets: int,
        scalars: Mapping[str, torch.Tensor],
        **fields: Any,
    ) -> dict[str, Any]:
        """Return the metrics of the steps since the last line. Collective; waits for the device
        once.

        Loss and norm are the last step's, over all ranks; None without `targets`. `scalars`: other
        values to read. `fields` are copied to the line.
        """
        read = {"loss": loss, "grad_norm": grad_norm, **scalars}
        if loss.device.type == "cuda":
            read["peak_allocated_gib"] = _peak_allocated_gib(loss.device)
        values = _read(read, loss.device)
        elapsed_s = time.perf_counter() - self._since
        rates = {
            "step_time_s": elapsed_s / max(self._steps, 1),
            "tokens_per_s": self._tokens / elapsed_s,
            # Model FLOPs utilisation: the model's FLOPs over the devices' peak.
            "mfu": self._peak_flops and self._flops / elapsed_s / self._peak_flops,
            "data_wait_share": min(1.0, self._waited_s / elapsed_s),
        }
        if self.plan.config.data.batching != "packed":
            fields["padding_share"] = 1 - self._tokens / max(self._positions, 1)
        if self.plan.curriculum.rises:
            fields["global_batch"] = self._last.global_batch
            fields["sequence_length"] = self.plan.seq_len // self._last.pieces
        self.restart()
        if not targets:
            values |= {"loss": None, "grad_norm": None}
        return {**fields, "peak_allocated_gib": None, **values, **rates}


def _peak_flops(plan: Plan) -> float | None:
    """Return the peak dense FLOP/s of all devices in the run's precision; None if they, or the
    model's FLOPs, are unknown, and if ranks share a GPU.
    """
    gpu = known_gpu(plan.world.gpu) if plan.shape and plan.world.ranks_per_gpu == 1 else None
    tflops = gpu.peak_tflops(plan.precision) if gpu else None
    return tflops * 1e12 * plan.world.world_size if tflops else None


def _peak_allocated_gib(device: torch.device) -> torch.Tensor:
    """Return the highest peak of any rank since the last call, on the device. Collective."""
    peak = torch.full((), torch.cuda.max_memory_allocated(device) / GIB, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak


def _read(
    scalars: Mapping[str, float | torch.Tensor], device: torch.device
) -> dict[str, float | None]:
    """Return the values of scalars by name, reading those on the device with a single wait."""
    device_values = {
        name: value.double()
        for name, value in scalars.items()
        if isinstance(value, torch.Tensor) and value.device == device
    }
    read = dict(zip(device_values, torch.stack([*device_values.values()]).tolist(), strict=True))
    return {name: float(read.get(name, value)) for name, value in scalars.items()}


def monitor_events(line: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Return a metrics line as (name, value, samples) for the JSON's monitors."""
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "eval_loss")
    of_sources = [name for name in line if name.startswith(("loss/", "eval_loss/", "own/"))]
    shown = [name for name in (*names, *of_sources) if line.get(name) is not None]
    return [(f"train/{name}", line[name], line["samples"]) for name in shown]


class SourceLosses(Instrument):
    """Mean training loss of each source since the last metrics line; none without several sources,
    and none with Liger's loss, which returns only the sum.
    """

    def __init__(self, names: Sequence[str], engine: Engine) -> None:
        self._names = names if engine.plan.config.model.kernels != "liger" else ()
        self._engine = engine
        self._targets = [0] * len(self._names)
        if self._names:
            engine.count_sources(len(self._names))

    def before(self, step: Step) -> None:
        """Count the targets of an optimizer step, even if it is then skipped."""
        if self._names:
            both = zip(self._targets, step.targets_by_source, strict=True)
            self._targets = [sum(targets) for targets in both]

    def values(self, step: Step) -> dict[str, torch.Tensor]:
        """Return loss/NAME in nats for the steps since the last call, over all ranks. A source
        without targets in these steps has no loss. Collective.
        """
        sums = self._engine.source_losses()
        if sums is None:
            return {}
        means = {
            f"loss/{name}": sums[number] / targets
            for number, (name, targets) in enumerate(zip(self._names, self._targets, strict=True))
            if targets
        }
        self._targets = [0] * len(self._names)
        return means


class ExpertLoad(Instrument):
    """How evenly routers spread the tokens since the last metrics line over the experts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def values(self, step: Step) -> dict[str, torch.Tensor]:
        """Return `expert_load` of all ranks. Collective."""
        return expert_load(self._engine.expert_tokens())


def expert_load(tokens: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return scalars on the device from (layers, experts) tokens sent to each expert; {} for None.

    `expert_load_max`: the busiest expert's tokens relative to its layer's mean, in the worst layer.
    `expert_load_entropy`: entropy of a layer's shares relative to equal shares, mean over layers.
    """
    if tokens is None:
        return {}
    shares = tokens.double() / tokens.sum(1, keepdim=True).clamp(min=1)
    experts = tokens.shape[1]
    entropy = torch.special.entr(shares).sum(1).mean() / math.log(experts)
    return {"expert_load_max": shares.max() * experts, "expert_load_entropy": entropy}


TOLERANCE = 0.1
_STARTING = 1
"""Metrics lines ignored at the start of a process: memory is being allocated, kernels loaded."""
_LARGE = 0.1
"""Smallest fraction of a step for which the message names a term."""


_LOOKED_AT = 32
"""Number of samples whose documents are inspected."""


def seen_tokens(stream: Stream) -> float | None:
    """Return the average number of tokens that a token attends to in its document, itself included,
    in the first samples; None if attention is not confined to documents, or for batches by length,
    whose steps differ.
    """
    if not stream.document_mask or isinstance(stream, Padded):
        return None
    count = _LOOKED_AT if stream.length is None else min(_LOOKED_AT, stream.length)
    positions = stream.batch(0, count).position_ids
    return None if positions is None else round(float(positions.double().mean()) + 1, 1)


class StepClock(Instrument):
    """Compares the second metrics line of a process with the estimated step time, once."""

    def __init__(self, plan: Plan, seen_tokens: float | None = None) -> None:
        self.predicted: StepTime | None = step_time(plan, seen_tokens=seen_tokens)
        self._lines = 0

    def after(self, step: Step, line: Mapping[str, Any] | None) -> None:
        """Record predicted and measured time after the second metrics line."""
        if line is None or (predicted := self.predicted_of_next_line()) is None:
            return
        measured = line["step_time_s"]
        data_s = line["data_wait_share"] * measured
        text = self.text(measured, data_s)
        self._run.event(
            "time",
            step=step.number,
            measured_s=measured,
            data_s=data_s,
            predicted=predicted.to_json(),
            message=text,
        )
        self._run.progress.say(f"time           {text}")

    def predicted_of_next_line(self) -> StepTime | None:
        """Return the estimate to compare with the next metrics line; None for all but one line."""
        self._lines += 1
        return self.predicted if self._lines == _STARTING + 1 else None

    def text(self, seconds: float, data_seconds: float) -> str:
        """Return both times in one line and, if they differ, the terms that may be off."""
        assert self.predicted is not None, "there is an estimate"
        step = self.predicted
        error = step.seconds / seconds - 1
        text = f"{seconds:.3g} s per step, predicted {error:+z.1%} ({step.machine.evidence} rates)"
        if abs(error) <= TOLERANCE:
            return text
        terms = sorted(step.terms.items(), key=lambda term: -term[1])
        large = [
            f"{TERMS[name]} {value:.3g} s"
            for name, value in terms
            if value >= _LARGE * step.seconds
        ]
        why = f"{text} (!): the prediction has {', '.join(large)}"
        if error < 0 and data_seconds >= _LARGE * seconds:
            why += f"; {data_seconds:.3g} s of waiting for data are not predicted"
        return why


SAMPLED = 2**20
"""Number of a rank's weights whose change is measured, evenly spaced; all if there are fewer."""


class WeightChange(Instrument):
    """Measures single steps: the norm of all weights, and the relative norm of their change.

    Does not wait for the device. A copy of all weights might not fit, so the change is measured on
    every n-th weight. Weights on NVMe are not read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._on_nvme = offloaded_to(engine.plan.deepspeed, "optimizer") == "nvme"
        self._log = engine.plan.config.log
        self._step = 0
        self._before: list[torch.Tensor] = []

    @torch.no_grad()
    def before(self, step: Step) -> None:
        """Copy the sampled weights before a step of log.weights_every."""
        if self._log.is_due(step.number, self._log.weights_every) and not self._on_nvme:
            self._step, self._before = step.number, _sample(self._weights())

    @torch.no_grad()
    def values(self, step: Step) -> dict[str, torch.Tensor]:
        """Return `param_norm` and `update_ratio` of such a step; {} otherwise. Collective."""
        before, self._before = self._before, []
        if step.number != self._step:
            return {}
        weights = self._weights()
        changes = [new - old for new, old in zip(_sample(weights), before, strict=True)]
        norms = [_norm(tensors) for tensors in (weights, changes, before)]
        squares = torch.stack([on_device(norm, self._engine.device) for norm in norms]).square()
        squares[1:] *= _stride(weights)
        dist.all_reduce(squares)
        norm, change, whole = squares.sqrt()
        return {"param_norm": norm, "update_ratio": change / whole}

    def _weights(self) -> list[torch.Tensor]:
        return [fragment.tensors[WEIGHT] for fragment in self._engine.fragments(states=False)]


def _stride(weights: list[torch.Tensor]) -> int:
    return max(1, sum(weight.numel() for weight in weights) // SAMPLED)


def _sample(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of every n-th element of each weight, in fp32."""
    stride = _stride(weights)
    return [weight[::stride].to(torch.float32, copy=True) for weight in weights]


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.nn.utils.get_total_norm(norms).double()
