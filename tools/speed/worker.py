"""Times one case in its own processes: the real training loop on real data.

Rank 0 writes the result to `--out`: the measurements, or the error.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from harness.engine.processes import ending_together
from harness.errors import ConfigError, ExitCode
from harness.estimate.hardware import known_gpu
from harness.estimate.memory_item import GIB
from harness.layout.shape import flops_per_token, num_parameters
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.run.live_memory import is_out_of_memory
from tools.preflight_checks.network import all_reduce_gb_per_s
from tools.speed.recorder import Enough, Recorder

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
        run.ended("stopped", ExitCode.DONE)
        run.guard.close(wait=False)
        run.watchdog.close()
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
        "seq_len": plan.config.data.seq_len,
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
    tokens_per_s = plan.global_batch * plan.config.data.seq_len / step_s / plan.world.world_size
    tflops, mfu, gpu = None, None, known_gpu(plan.world.gpu)
    if plan.shape is not None:
        tflops = flops_per_token(plan.shape, plan.config.data.seq_len) * tokens_per_s / 1e12
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


if __name__ == "__main__":
    main()
