"""Metrics of the steps: measured, reduced over ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from harness.estimate.hardware import known_gpu
from harness.estimate.units import GIB
from harness.layout.attention_table import seen_by
from harness.layout.shape import Shape, flops_per_token
from harness.plan.plan import Plan
from harness.steps import Step


class Meter:
    """Times steps and turns their results into one metrics line."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._peak_flops = _peak_flops(plan)
        self.restart()

    def restart(self) -> None:
        """Leave out what just happened (evaluation, saving) from the next step time."""
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
        if self._peak_flops is not None and self.plan.shape is not None:
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
        """Return the metrics of the steps since the last line. Collective; waits for the device,
        once.

        Loss and norm are those of the last step, of all ranks; None if it has no `targets`.
        `scalars`: further metrics on the device.
        """
        read = {"loss": loss, "grad_norm": grad_norm, **scalars}
        if loss.device.type == "cuda":
            read["peak_allocated_gib"] = _peak_allocated_gib(loss.device)
        values = _read(read, loss.device)
        elapsed_s = time.perf_counter() - self._since
        rates = {
            "step_time_s": elapsed_s / max(self._steps, 1),
            "tokens_per_s": self._tokens / elapsed_s,
            # Model FLOPs utilisation: the model's own FLOPs over the devices' peak.
            "mfu": self._peak_flops and self._flops / elapsed_s / self._peak_flops,
            "data_wait_share": min(1.0, self._waited_s / elapsed_s),
        }
        if self.plan.config.data.batching != "packed":
            fields["padding_share"] = 1 - self._tokens / max(self._positions, 1)
        if self.plan.curriculum.rises:
            fields["global_batch"] = self._last.global_batch
            fields["sequence_length"] = self.plan.config.data.seq_len // self._last.pieces
        self.restart()
        if not targets:
            values |= {"loss": None, "grad_norm": None}
        return {**fields, "peak_allocated_gib": None, **values, **rates}


def _peak_flops(plan: Plan) -> float | None:
    """Return the dense FLOP/s of all devices together in the run's precision; None if unknown."""
    gpu = known_gpu(plan.world.gpu)
    tflops = gpu.peak_tflops(plan.precision) if gpu else None
    return tflops * 1e12 * plan.world.world_size if tflops else None


def _peak_allocated_gib(device: torch.device) -> torch.Tensor:
    """Return the peak of any rank's allocator since the last call, on the device. Collective."""
    peak = torch.full((), torch.cuda.max_memory_allocated(device) / GIB, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak


def _read(
    scalars: Mapping[str, float | torch.Tensor], device: torch.device
) -> dict[str, float | None]:
    """Return the values of scalars by name: those on the device together, in one wait for it."""
    there = {
        name: value.double()
        for name, value in scalars.items()
        if isinstance(value, torch.Tensor) and value.device == device
    }
    read = dict(zip(there, torch.stack([*there.values()]).tolist(), strict=True))
    return {name: float(read.get(name, value)) for name, value in scalars.items()}


def monitor_events(line: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Return a metrics line as (name, value, samples) for the JSON's monitors, like TensorBoard."""
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "eval_loss")
    of_sources = [name for name in line if name.startswith(("loss/", "eval_loss/"))]
    shown = [name for name in (*names, *of_sources) if line.get(name) is not None]
    return [(f"train/{name}", line[name], line["samples"]) for name in shown]
