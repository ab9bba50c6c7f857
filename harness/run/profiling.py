"""Traces some steps, and counts the FLOPs of a forward pass by operation and module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from harness.data.batch import Batch
from harness.engine.api import Engine, StepResult
from harness.errors import RunStopped
from harness.layout.shape import flops_per_unit
from harness.plan.plan import Plan
from harness.run.instrument import Instrument
from harness.steps import Step

_Shape = tuple[int, ...]
DEPTH = 6  # of module names in the table: down to the submodules of a decoder layer


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the FLOPs of matrix products, convolutions and attention.

    ZeRO gathers weights before their use, so the counts are those of the unsharded model. Kernels
    that torch does not dispatch as operators (Triton's, an extension's) are missing.
    """
    aten: Any = torch.ops.aten
    # torch has no formula for attention on CPUs; the others of 2.10 refuse shared key heads.
    names = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    attention = {getattr(aten, f"_scaled_dot_product_{name}"): _attention_flops for name in names}
    return FlopCounterMode(display=False, custom_mapping=attention)


def _attention_flops(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention; shapes are (batch, heads, tokens, width)."""
    flops: int = sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:]))
    return flops


def flop_table(counter: FlopCounterMode, title: str) -> str:
    """Return the counts as text: the total, by operation, and by module down to DEPTH."""
    total, by_module = counter.get_total_flops(), counter.get_flop_counts()
    operations = [(str(name), count) for name, count in by_module.get("Global", {}).items()]
    modules = [
        (name, sum(counts.values()))
        for name, counts in by_module.items()
        if name != "Global" and name.count(".") < DEPTH
    ]
    return "\n".join(
        [
            f"{title}: {total:,} FLOPs",
            *("", "by operation", *_lines(sorted(operations, key=lambda row: -row[1]), total)),
            *("", "by module", *_lines(modules, total)),
            "",
        ]
    )


def _lines(rows: Iterable[tuple[str, int]], total: int) -> Iterable[str]:
    return (f"{count:24,} {count / (total or 1):6.1%} {name}" for name, count in rows)


LARGEST = 10
"""Number of operations in the summary."""


class Profiler(Instrument):
    """Traces steps [first, last) on rank 0, and counts the FLOPs of a pass after step `last`.

    A stop writes the steps traced so far, and the resumed run traces the rest. A rollback drops
    them, and they are traced again.
    """

    def __init__(
        self, plan: Plan, engine: Engine, folder: Path, say: Callable[[str], None]
    ) -> None:
        """All files are written to `folder`; `say` prints a line."""
        assert plan.config.profile.window is not None
        self.first, self.last = plan.config.profile.window
        self.plan, self.engine, self.say = plan, engine, say
        self.folder = folder if plan.world.rank == 0 else None
        self._trace: Any = None
        self._traced: list[int] = []
        self._step = contextlib.ExitStack()  # what marks a step in the trace
        if self.folder:
            self.folder.mkdir(exist_ok=True)

    def before(self, step: Step) -> None:
        """Trace a training step if it is one of the profiled steps."""
        if not (self.folder and self.first <= step.number < self.last):
            return
        if self._trace is None:
            cuda = [ProfilerActivity.CUDA] if self.engine.device.type == "cuda" else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._trace.start()
        self._traced.append(step.number)
        self._step.enter_context(record_function(f"step {step.number}"))

    def step(self, step: Step, result: StepResult) -> None:
        """End the step in the trace."""
        self._step.close()

    def after(self, step: Step, line: Mapping[str, Any] | None) -> None:
        """Write the trace or count that a step completes. Collective."""
        self._run.pulse("profile", step.number)
        if step.number == self.last - 1:
            self._write_trace()
        elif step.number == self.last:
            batch = step.batches[0]
            # No backward pass: the counter's hooks would change its summation order, and so the
            # rounding.
            with flop_counter() if self.folder else contextlib.nullcontext() as counter:
                self.engine.eval_batch([batch])
            if counter is not None:
                self._write_flops(counter, batch)
        if step.number in (self.last - 1, self.last):
            self._run.meter.restart()

    def end(self, error: BaseException | None) -> None:
        """End an unfinished trace: write it after a stop, drop it after an error."""
        self._step.close()
        if error is None or isinstance(error, RunStopped):
            self._write_trace()
        else:
            self.rolled_back()

    def rolled_back(self) -> None:
        """Discard an unfinished trace; after a rollback its steps are traced again."""
        self._step.close()
        trace, self._trace, self._traced = self._trace, None, []
        if trace is not None:
            with contextlib.suppress(RuntimeError):  # must not hide the original error
                trace.stop()

    def _write_trace(self) -> None:
        if self._trace is None or self.folder is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        steps, self._traced = self._traced, []
        path = self.folder / f"trace-{steps[0]}-{steps[-1]}.json.gz"
        trace.export_chrome_trace(str(path))
        self.say("\n".join([f"profile        {path}", *largest(trace, len(steps))]))

    def _write_flops(self, counter: FlopCounterMode, batch: Batch) -> None:
        """Write torch's count, and show it relative to a third of the FLOPs that mfu counts for
        these tokens.
        """
        if self.folder is None:
            return
        title, total = "a forward pass of a micro-batch", counter.get_total_flops()
        path = self.folder / f"flops-{self.last}.txt"
        path.write_text(flop_table(counter, title), encoding="utf-8")
        text = f"{title}: {total:,} FLOPs counted by torch"
        if self.plan.shape is not None:
            samples, tokens = batch.input_ids.shape
            first, end = (self.plan.stages or (0, None))[:2]  # rank 0 has the first stage
            units = flops_per_unit(self.plan.shape, tokens)[first:end]
            expected = sum(units) * samples * tokens // 3
            text += f", {total / expected:.3f} of those used for mfu"
        self.say(f"profile        {path}: {text}")


def largest(trace: Any, steps: int) -> list[str]:
    """Return lines on the operations with the highest self time per step, on the GPU if any."""
    entries = [entry for entry in trace.key_averages() if not entry.is_user_annotation]
    place = "device" if any(entry.self_device_time_total for entry in entries) else "cpu"
    times = [(getattr(entry, f"self_{place}_time_total") / 1e3, entry) for entry in entries]  # ms
    whole_ms = sum(time for time, _ in times) or 1
    return [
        f"  {time / steps:10.3f} ms {time / whole_ms:6.1%} {entry.count / steps:8.1f} x {entry.key}"
        for time, entry in sorted(times, key=lambda item: -item[0])[:LARGEST]
    ]
