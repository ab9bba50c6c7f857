"""Metrics of the steps: measured, reduced over ranks, shown on the terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist

from harness.config.curriculum import Slice
from harness.estimate.hardware import known_gpu
from harness.estimate.inputs import GIB
from harness.layout.shape import flops_per_token
from harness.plan.plan import Plan


class Meter:
    """Times steps and turns their results into one metrics line."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._peak_flops = _peak_flops(plan)
        self._since = time.perf_counter()
        self._steps = self._tokens = 0
        self._flops = 0.0

    def restart(self) -> None:
        """Leave out what just happened (evaluation, saving) from the next step time."""
        self._since = time.perf_counter()
        self._steps = self._tokens = 0
        self._flops = 0.0

    def step_done(self, reads: Slice) -> None:
        """Count one optimizer step."""
        seq_len = self.plan.config.data.seq_len
        tokens = reads.global_batch * seq_len
        self._steps += 1
        self._tokens += tokens
        if self._peak_flops is not None and self.plan.shape is not None:
            self._flops += tokens * flops_per_token(self.plan.shape, seq_len // reads.pieces)
        self._last = reads

    def line(
        self, loss_share: torch.Tensor, grad_norm: float | torch.Tensor, targets: int, **fields: Any
    ) -> dict[str, Any]:
        """Return the metrics of the steps since the last line. Collective; waits for the device.

        Loss and norm are those of the last step; None if it has no `targets`.
        """
        loss = loss_share.detach().clone()
        dist.all_reduce(loss)
        peak_gib = _peak_allocated_gib(loss.device)
        elapsed_s = time.perf_counter() - self._since
        rates = {
            "step_time_s": elapsed_s / max(self._steps, 1),
            "tokens_per_s": self._tokens / elapsed_s,
            # Model FLOPs utilisation: the model's own FLOPs over the devices' peak.
            "mfu": self._peak_flops and self._flops / elapsed_s / self._peak_flops,
        }
        if self.plan.curriculum.rises:
            fields["global_batch"] = self._last.global_batch
            fields["sequence_length"] = self.plan.config.data.seq_len // self._last.pieces
        self.restart()
        return {
            **fields,
            "loss": float(loss) if targets else None,
            "grad_norm": float(grad_norm) if targets else None,
            **rates,
            "peak_allocated_gib": peak_gib,
        }


def _peak_flops(plan: Plan) -> float | None:
    """Return the dense FLOP/s of all devices together in the run's precision; None if unknown."""
    gpu = known_gpu(plan.world.gpu)
    tflops = gpu.peak_tflops(plan.precision) if gpu else None
    return tflops * 1e12 * plan.world.world_size if tflops else None


def _peak_allocated_gib(device: torch.device) -> float | None:
    """Return the peak of any rank's allocator since the last call; None on CPU. Collective."""
    if device.type != "cuda":
        return None
    peak = torch.tensor(float(torch.cuda.max_memory_allocated(device)), device=device)
    torch.cuda.reset_peak_memory_stats(device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak) / GIB


class Progress:
    """A live line on a terminal; elsewhere one plain line per metrics line."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        self.total_steps = 0  # set once the data is counted
        self.enabled = enabled
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self._average_s: float | None = None
        self._width = 0

    def step(self, line: dict[str, Any]) -> None:
        """Show one metrics line and the remaining time."""
        parts = [f"step {line['step']:>{len(str(self.total_steps))}}/{self.total_steps}"]
        if "loss" in line:
            parts += self._training_parts(line)
        if "eval_loss" in line:
            parts.append(f"held-out loss {line['eval_loss']:.4f}")
        self._write(" | ".join(parts), keep=not self.live or "eval_loss" in line)

    def _training_parts(self, line: dict[str, Any]) -> list[str]:
        seconds = line["step_time_s"]
        average = seconds if self._average_s is None else 0.9 * self._average_s + 0.1 * seconds
        self._average_s = average
        losses = ["no target"]
        if line["loss"] is not None:
            losses = [f"loss {line['loss']:.4f}", f"norm {line['grad_norm']:.3f}"]
        parts = [
            *losses,
            f"lr {line['learning_rate']:.2e}",
            f"{line['tokens_per_s']:,.0f} tokens/s",
        ]
        if line["mfu"] is not None:
            parts.append(f"mfu {line['mfu']:.1%}")
        if line["loss_scale"] != 1.0:
            parts.append(f"scale {line['loss_scale']:g} skipped {line['skipped_steps']}")
        parts.append(f"{clock(average * (self.total_steps - line['step']))} left")
        return parts

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(text, keep=True)

    def _write(self, text: str, keep: bool) -> None:
        if not self.enabled:
            return
        if self.live:
            text = "\r" + text.ljust(self._width)
            self._width = 0 if keep else len(text) - 1
        try:
            self.stream.write(text + ("\n" if keep else ""))
            self.stream.flush()
        except OSError:  # a closed terminal, a log on a full disk: the records say the same
            self.enabled = False
            # Text left in the buffer would make Python exit with a code of its own.
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), self.stream.fileno())


def monitor_events(line: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Return a metrics line as (name, value, samples) for the JSON's monitors, like TensorBoard."""
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "eval_loss")
    return [(f"train/{n}", line[n], line["samples"]) for n in names if line.get(n) is not None]


def clock(seconds: float) -> str:
    """Return seconds as "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
