"""Compares the first step of a pipelined run with the unsplit model's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.find import is_run
from harness.data.batches import Batch
from harness.errors import ConfigError
from harness.estimate.fit import free_on_host
from harness.layout.grid import Grid
from harness.layout.share import Share
from harness.run.live_memory import is_out_of_memory
from harness.run.run import Run, Unsplit

# Relative differences of loss and gradient norm: wider than rounding in the parity gate. In 16
# bits a defect may stay below them: a lost mask that moves the loss by 3e-4 passes the loss check.
TOLERANCES = {"fp32": (1e-5, 1e-3), "bf16": (1e-3, 5e-2), "fp16": (1e-3, 2e-2)}
# Largest first batch that pipeline.verify = "auto" checks, in FLOP: 3 s of an H200's matrix
# products (790 TFLOP/s), or 8 s of each CPU thread, at the 127 GFLOP/s measured in fp32 on a Xeon.
_AUTO_FLOPS = {"cuda": 2e15, "cpu": 1e12}


def unsplit_start(run: Run) -> Unsplit | None:
    """Return the unsplit model's loss and gradient norm before the first step, computed on rank 0;
    compare the stages' loss at once. `check_norm` compares the norm after the step. Collective.

    None for a run without stages, a resumed run, and a run that is not compared (an event says so).
    Raises ConfigError if the losses differ.
    """
    plan = run.plan
    if plan.stages is None or run.state.step > 0:
        return None
    targets = run.data.train.targets_in(0, plan.curriculum.at(0).global_batch)
    answer: list[Any] = [None, None]
    if run.is_writer:  # rank 0 decides for all: free memory differs
        answer = _computed(run, targets)
    dist.broadcast_object_list(answer)
    unsplit: Unsplit | None = answer[0]
    if unsplit is None:
        run.event("not_verified", message=answer[1])
        return None
    mine = _micro_batches(run, plan.share)
    loss = run.engine.sum_over_ranks(run.engine.eval_batch(mine))[0].item() / max(targets, 1)
    _check("loss", loss, unsplit.loss, TOLERANCES[plan.precision][0], run)
    return unsplit


def check_norm(run: Run, unsplit: Unsplit, grad_norm: float | torch.Tensor) -> None:
    """Compare the first step's gradient norm. Raises ConfigError if it differs."""
    norm, result = unsplit.grad_norm, "not compared: steps are random"
    if norm is not None:
        result = "not compared: fp16 overflowed"
    if norm is not None and run.engine.step_applied and math.isfinite(norm):
        tolerance = TOLERANCES[run.plan.precision][1]
        _check("gradient norm", float(grad_norm), norm, tolerance, run)
        run.event("verified", loss=unsplit.loss, grad_norm=norm)
    else:
        run.event("verified", loss=unsplit.loss, grad_norm=result)


def _check(name: str, value: float, expected: float, tolerance: float, run: Run) -> None:
    if math.isclose(value, expected, rel_tol=tolerance):
        return
    raise ConfigError(
        f"the first batch's {name} is {value:.7g} over {run.plan.grid.pipeline} pipeline stages, "
        f"but {expected:.7g} without (relative tolerance {tolerance:g}): "
        f"{run.plan.config.model.name} does not train right in stages; use ZeRO 3, and report this"
    )


def _computed(run: Run, targets: int) -> list[Any]:
    """Return [the unsplit model's loss and norm, None] or [None, the reason why there is none]."""
    from harness.engine.unsplit import unsplit_loss_and_norm  # imports DeepSpeed

    reason = _reason_to_skip(run)
    if reason is not None:
        return [None, reason]
    engine, batches = run.engine, _micro_batches(run, Share(Grid(1), 0))
    try:
        loss, norm = unsplit_loss_and_norm(
            run.plan, engine.module, engine.device, batches, targets, engine.loss_scale
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return [None, "the unsplit model does not fit one rank"]
    finally:
        if engine.device.type == "cuda":  # from here on the peak is the run's own
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if not math.isfinite(loss):
        return [None, f"the unsplit model's own loss is {loss}"]
    return [Unsplit(loss, norm), None]


def _reason_to_skip(run: Run) -> str | None:
    """Return the reason to skip the comparison; None if it is to be made."""
    from harness.engine.unsplit import bytes_needed, trained  # imports DeepSpeed

    if is_run(run.plan.config.model.init_from or ""):
        return "the weights are those of a checkpoint, whose probe was compared"
    verify, model, device = run.plan.config.pipeline.verify, run.engine.module, run.engine.device
    if verify is False:
        return "pipeline.verify is false"
    if verify is True:
        return None
    needed, free = bytes_needed(run.plan, model), free_on_host()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    if free is not None and needed > free // 2:
        return f"the unsplit model needs {needed / 2**30:.1f} GiB on one rank"
    tokens = run.plan.curriculum.at(0).global_batch * run.plan.config.data.seq_len
    flops = 6.0 * tokens * sum(parameter.numel() for parameter in trained(model))
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if flops > _AUTO_FLOPS[device.type] * threads:
        return f"one rank would take {flops:.0e} FLOP for the first batch"
    return None


def _micro_batches(run: Run, share: Share) -> list[Batch]:
    """Return the micro-batches that one share has of the first global batch."""
    micro, first = run.plan.micro_batch, run.plan.curriculum.at(0)
    starts = share.starts(first.global_batch, micro)
    return [run.data.train.batch(start, micro).cut(first.pieces) for start in starts]
