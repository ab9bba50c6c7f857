"""Times one case in its own processes: the real training loop on real data.

Rank 0 writes the result to `--out`: the measurements, or the error. On a CUDA device it counts the
places where the host waits, too.
"""

import argparse
import contextlib
import functools
import json
import re
import resource
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness.engine.processes import ending_together
from harness.errors import ConfigError
from harness.estimate.hardware import known_gpu
from harness.estimate.memory_item import GIB
from harness.launch.ranks import REPOSITORY
from harness.layout.shape import flops_per_token, num_parameters
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.run.live_memory import is_out_of_memory
from harness.run.run import Run
from tools.preflight_checks.network import all_reduce_gb_per_s

FALLBACKS = ("fallback", "changed", "not_compared", "loss_not_chunked", "loss_not_fused")
"""Kinds of events that report a change to the request or a slower path."""


def main() -> None:
    """Time a case and write its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", type=Path, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("assignments", nargs="*")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with ending_together():
        try:
            plan = plan_from(Command(args.deepspeed, assignments=tuple(args.assignments)))
            report |= _expected(plan)
            report |= timed(plan, args.warmup, args.steps)
        except ConfigError as error:
            report["refused"] = str(error)
        except BaseException as error:
            if is_out_of_memory(error):  # possibly on this rank only
                report["error"] = f"out of memory: {str(error).splitlines()[0]}"
                args.out.write_text(json.dumps(report))
            raise
        if int(report.get("rank", 0)) == 0:
            args.out.write_text(json.dumps(report))


def timed(plan: Plan, warmup: int, steps: int) -> dict[str, Any]:
    """Train with the run's own loop and data; time `steps` steps after `warmup`."""
    from harness.loop import build, train
    from harness.run.ending import break_off

    run = build(plan)
    device = run.engine.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    recorder = Recorder(run, warmup, steps)
    try:
        train(run)
        raise AssertionError("a run has more steps than are timed")
    except Enough:
        report = recorder.report()
    finally:
        break_off(run)
    links = None
    if plan.world.world_size > 1:
        links = all_reduce_gb_per_s(plan.world, device)
    return {
        **report,
        **_rates(plan, report["step_time_s"]),
        **_peak(device),
        "all_reduce_gb_per_s": links,
        "fallbacks": fallbacks(run.folder.read_events()),
    }


def fallbacks(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return messages about settings that the run changed and fast paths that it does not use."""
    return [str(event["message"]) for event in events if event["kind"] in FALLBACKS]


def _expected(plan: Plan) -> dict[str, Any]:
    return {
        "rank": plan.world.rank,
        "device": plan.world.gpu or plan.world.accelerator,
        "ranks": plan.world.world_size,
        "parameters": num_parameters(plan.shape) if plan.shape else None,
        "seq_len": plan.seq_len,
        "micro_batch": plan.micro_batch,
        "global_batch": plan.global_batch,
        "zero_stage": plan.zero_stage,
        "precision": plan.precision,
        "estimated_gib": plan.estimate.worst.peak / GIB if plan.estimate else None,
        "verdict": plan.estimate.verdict if plan.estimate else None,
    }


def _rates(plan: Plan, step_s: float) -> dict[str, Any]:
    """Return tokens per second, TFLOP/s and MFU per GPU. FLOPs as in layout/shape.py, without
    recomputation.
    """
    tokens_per_s = plan.global_batch * plan.seq_len / step_s / plan.world.world_size
    tflops, mfu, gpu = None, None, known_gpu(plan.world.gpu)
    if plan.shape is not None and plan.world.ranks_per_gpu == 1:
        tflops = flops_per_token(plan.shape, plan.seq_len) * tokens_per_s / 1e12
        peak = gpu and gpu.peak_tflops(plan.precision)
        mfu = tflops / peak if peak else None
    return {"tokens_per_s_per_gpu": tokens_per_s, "tflops_per_gpu": tflops, "mfu": mfu}


def _peak(device: torch.device) -> dict[str, Any]:
    """Return this rank's peaks in GiB: process size and, on a GPU, torch's allocator."""
    peaks = {"peak_process_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if device.type == "cuda":
        peaks["peak_allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        peaks["peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return peaks


# --- the recorder of steps and waits ---

WINDOWS = 4
WARNING = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp
_INSIDE = (f"{Path(torch.__file__).parent}/", contextlib.__file__, warnings.__file__, __file__)
"""Path prefixes of frames that are not call sites, such as those of the installed torch."""
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_EXPLICIT = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
"""Waits that torch's sync debug mode does not report."""


class Enough(Exception):
    """Raised after the last timed step."""


class Recorder:
    """Times the steps of a run; raises Enough after the last.

    The host waits for the device only at the ends of a few windows of steps; within a window it
    runs ahead as in any run. After the last window, one more step counts the waits.
    """

    def __init__(self, run: Run, warmup: int, steps: int) -> None:
        self._run = run
        self._loss_shares: list[torch.Tensor] = []
        self._ends = _ends(max(warmup, 1), steps)
        self._marks: list[float] = []
        self._waits: Counter[str] = Counter()
        self._counting = ExitStack()
        self._take = run.engine.train_batch
        run.engine.train_batch = self._train_batch

    def _train_batch(self, *args: Any, **kwargs: Any) -> Any:
        result = self._take(*args, **kwargs)
        self._loss_shares.append(result.loss_share.detach().clone())
        done = len(self._loss_shares)
        if done in self._ends:
            self._finish()
            self._marks.append(time.perf_counter())
        if done == self._ends[-1] and self._on_cuda:
            self._waits = self._counting.enter_context(counted_waits())
        elif done >= self._ends[-1]:
            self._counting.close()
            raise Enough
        return result

    @property
    def _on_cuda(self) -> bool:
        return self._run.engine.device.type == "cuda"

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._run.engine.device)

    def report(self) -> dict[str, Any]:
        """Return seconds per step, losses, and waits of the host. Collective."""
        pairs = zip(self._ends, self._ends[1:], self._marks, self._marks[1:], strict=False)
        seconds = [(late - soon) / (last - first) for first, last, soon, late in pairs]
        losses = self._run.sum(torch.stack(self._loss_shares))
        return {
            "step_time_s": statistics.median(seconds),
            "step_time_s_range": [min(seconds), max(seconds)],
            "loss": losses[self._ends[-1] - 1],
            "losses": losses[: self._ends[-1]],
            "host_waits_per_step": sum(self._waits.values()) if self._on_cuda else None,
            "host_waits": dict(self._waits.most_common()) if self._on_cuda else None,
        }


def _ends(warmup: int, steps: int) -> list[int]:
    """Return the steps after which to wait for the device: the last warmup step and the last step
    of each window.
    """
    windows = min(WINDOWS, steps)
    return [warmup + steps * number // windows for number in range(windows + 1)]


# --- waits ---


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count the waits in the body, as "harness/run/meter.py:59" -> count. Slows it down."""
    places: Counter[str] = Counter()

    def warned(message: Any, *_: Any, **__: Any) -> None:
        if WARNING in str(message):
            places[call_site(traceback.extract_stack())] += 1

    before = torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(mock.patch.object(warnings, "showwarning", warned))
        for owner, name in _EXPLICIT:
            counted = _counted(getattr(owner, name), places)
            stack.enter_context(mock.patch.object(owner, name, counted))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _counted(wait: Callable[..., Any], places: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def waits(*args: Any, **kwargs: Any) -> Any:
        places[call_site(traceback.extract_stack())] += 1
        return wait(*args, **kwargs)

    return waits


def call_site(stack: traceback.StackSummary) -> str:
    """Return the innermost line of a stack that is outside torch, with a shortened path."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_INSIDE):
            in_package = _INSTALLED.sub("", frame.filename).removeprefix(f"{REPOSITORY}/")
            return f"{in_package}:{frame.lineno}"
    return "?"


if __name__ == "__main__":
    main()
