"""One case, in processes of its own: the real plan and engine on random tokens, timed.

Rank 0 writes what it found to `--out`: numbers, or what went wrong.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.data.batches import Batch
from harness.engine.processes import ending_together, join
from harness.errors import ConfigError
from harness.estimate.hardware import known_gpu
from harness.estimate.inputs import GIB
from harness.layout.shape import flops_per_token, num_parameters
from harness.plan.command import Command, plan_from
from harness.plan.plan import Plan
from harness.run.live_memory import is_out_of_memory


def main() -> None:
    """Time a case, and write it down."""
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
            if is_out_of_memory(error):  # perhaps on this rank alone
                report["error"] = f"out of memory: {str(error).splitlines()[0]}"
                args.out.write_text(json.dumps(report))
            raise
        if int(report.get("rank", 0)) == 0:
            args.out.write_text(json.dumps(report))


def timed(plan: Plan, warmup: int, steps: int) -> dict[str, Any]:
    """Medians over `steps` optimizer steps after `warmup`; the host waits for every one."""
    device = join(plan.world)
    from harness.engine.build import build_engine

    torch.manual_seed(plan.world.rank)
    engine = build_engine(plan, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for step in range(warmup + steps):
        batches = [_batch(plan) for _ in range(plan.grad_accum)]
        targets = plan.global_batch * plan.config.data.seq_len
        dist.barrier()
        began = time.perf_counter()
        result = engine.train_batch(batches, targets, plan.config.optim.lr)
        loss = float(engine.sum_over_ranks(result.loss_share.clone()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step >= warmup:
            seconds.append(time.perf_counter() - began)
    median_s = statistics.median(seconds)
    return {
        "step_time_s": median_s,
        "step_time_s_range": [min(seconds), max(seconds)],
        **_rates(plan, median_s),
        **_peak(device),
        "loss": loss,
        "fallbacks": [event["why"] for event in engine.events if event["kind"] == "fallback"],
    }


def _batch(plan: Plan) -> Batch:
    """Random tokens, all of them targets: what they say costs nothing."""
    shape = (plan.micro_batch, plan.config.data.seq_len)
    ids = torch.randint(0, plan.model_config["vocab_size"], shape)
    if plan.world.accelerator == "cuda":
        ids = ids.pin_memory()
    return Batch(ids, ids.clone(), None)


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
    """Per GPU; TFLOP/s as in layout/shape.py, recomputation not counted."""
    tokens_per_s = plan.global_batch * plan.config.data.seq_len / step_s / plan.world.world_size
    tflops, mfu, gpu = None, None, known_gpu(plan.world.gpu)
    if plan.shape is not None:
        tflops = flops_per_token(plan.shape, plan.config.data.seq_len) * tokens_per_s / 1e12
        peak = gpu and gpu.peak_tflops(plan.precision)
        mfu = tflops / peak if peak else None
    return {"tokens_per_s_per_gpu": tokens_per_s, "tflops_per_gpu": tflops, "mfu": mfu}


def _peak(device: torch.device) -> dict[str, Any]:
    """Of this rank, GiB; on a CPU the whole process's largest size."""
    if device.type == "cpu":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_process_gib": kib * 1024 / GIB}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }


if __name__ == "__main__":
    main()
