"""Compares a divided model's first step with the undivided model's, and gradients between ranks."""

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch

from harness.checkpoint.collectives import broadcast_object, gather_objects
from harness.data.batch import Batch
from harness.engine.api import StepResult
from harness.errors import ConfigError
from harness.estimate.fit import free_on_host
from harness.layout.grid import Grid, Share
from harness.plan.plan import Plan
from harness.plan.weights import has_checkpoints
from harness.run.instrument import Instrument
from harness.run.live_memory import is_out_of_memory
from harness.run.run import Run
from harness.steps import Step

# Relative tolerances of loss and gradient norm: above the rounding in the parity gate. In 16 bits a
# defect may stay below them: a lost mask that changes the loss by 3e-4 passes the loss check.
TOLERANCES = {"fp32": (1e-5, 1e-3), "bf16": (1e-3, 5e-2), "fp16": (1e-3, 2e-2)}
# Largest relative difference of gradients that should be equal on all ranks: zero on CPUs, while
# GPUs sum in varying order. If a plan ignores a weight it is about 1.
AGREEMENT = 1e-2
# Largest first batch that layout.verify = "auto" checks, in FLOPs: 3 s of an H200's matrix products
# (790 TFLOP/s), or 8 s per CPU thread at the 127 GFLOP/s measured in fp32 on a Xeon.
_AUTO_FLOPS = {"cuda": 2e15, "cpu": 1e12}


@dataclass(frozen=True)
class Undivided:
    """Loss and gradient norm of the first global batch by the undivided model on one rank."""

    loss: float
    grad_norm: float | None
    """None if training steps are random."""


class Verification(Instrument):
    """Compares the first step of a divided model with the undivided model, and the gradients that
    tensor-parallel ranks should have in common. Raises ConfigError if they differ.
    """

    def __init__(self, plan: Plan) -> None:
        self.sees_gradients = plan.grid.tensor > 1
        self._undivided: Undivided | None = None

    def begin(self, run: Run) -> None:
        """Compare the loss of the first batch. Collective."""
        super().begin(run)
        self._first_step = run.state.step + 1
        self._undivided = undivided_start(run)

    def step(self, step: Step, result: StepResult) -> None:
        """Compare the gradient norm of the first step, and record its engine. Collective."""
        if step.number != self._first_step:
            return
        run = self._run
        run.event("engine", step=step.number, ranks=gather_objects(run.engine.describe()))
        if self._undivided is not None:
            _check_norm(run, self._undivided, result.grad_norm)

    def gradients(self) -> None:
        """Compare the gradients of weights that all tensor-parallel ranks hold, until they have
        been finite once. Collective.
        """
        if self.sees_gradients and (largest := _largest_distance(self._run)) is not None:
            self.sees_gradients = False
            self._run.event("gradients_agree", **largest)


def undivided_start(run: Run) -> Undivided | None:
    """Compute the undivided model's loss and gradient norm before the first step, on rank 0, and
    compare the divided model's loss. `Verification` compares the norm after the step. Collective.

    Returns None if the model is not divided, for a resumed run, and if the comparison is skipped,
    which is recorded as an event. Raises ConfigError if the losses differ.
    """
    plan = run.plan
    if not _division(run) or run.state.step > 0:
        return None
    run.pulse("verify", run.state.step)
    targets = run.data.train.targets_in(0, plan.curriculum.at(0).global_batch)
    # Rank 0 decides for all, because free memory differs.
    undivided = broadcast_object(_computed(run, targets) if run.is_writer else "")
    if isinstance(undivided, str):
        run.event("not_verified", message=undivided)
        return None
    mine = _micro_batches(run, plan.share)
    loss = run.engine.sum_over_ranks(run.engine.eval_batch(mine))[0].item() / max(targets, 1)
    _check("loss", loss, undivided.loss, TOLERANCES[plan.precision][0], run)
    return undivided


def _check_norm(run: Run, undivided: Undivided, grad_norm: float | torch.Tensor) -> None:
    """Compare the first step's gradient norm. Raises ConfigError if it differs."""
    norm = undivided.grad_norm
    result: float | str | None = norm
    if norm is None:
        result = "not compared: steps are random"
    elif not (run.engine.step_applied and math.isfinite(norm)):
        result = "not compared: fp16 overflowed"
    else:
        tolerance = TOLERANCES[run.plan.precision][1]
        _check("gradient norm", float(grad_norm), norm, tolerance, run)
    run.event("verified", loss=undivided.loss, grad_norm=result)


def _check(name: str, value: float, expected: float, tolerance: float, run: Run) -> None:
    if math.isclose(value, expected, rel_tol=tolerance):
        return
    how = "in stages" if _division(run).endswith("stages") else "divided"
    raise ConfigError(
        f"the first batch's {name} is {value:.7g} with {_division(run)}, "
        f"but {expected:.7g} without (relative tolerance {tolerance:g}): "
        f"{run.plan.config.model.name} does not train correctly {how}; use ZeRO 3, and report this"
    )


def _division(run: Run) -> str:
    """Return the sizes of the axes that divide the model, as text; "" if it is not divided."""
    grid = run.plan.grid
    sizes = {
        "pipeline stages": grid.pipeline,
        "tensor-parallel ranks": grid.tensor,
        "sequence-parallel ranks": grid.sequence,
        "expert-parallel ranks": grid.expert,
    }
    return " x ".join(f"{size} {what}" for what, size in sizes.items() if size > 1)


def _computed(run: Run, targets: int) -> Undivided | str:
    """Return the undivided model's loss and norm, or the reason for skipping the comparison."""
    from harness.engine.stages import unsplit_loss_and_norm  # imports DeepSpeed

    model = run.engine.undivided()
    reason = _reason_to_skip(run, model)
    if reason is not None:
        return reason
    engine, batches = run.engine, _micro_batches(run, Share(Grid(1), 0))
    try:
        loss, norm = unsplit_loss_and_norm(engine, model, batches, targets)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "the undivided model does not fit on one rank"
    finally:
        del model
        gc.collect()  # checkpointed layers hold themselves through their replaced forward
        if engine.device.type == "cuda":  # exclude this from the run's peak
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if not math.isfinite(loss):
        return f"the undivided model's loss is {loss}"
    return Undivided(loss, norm)


def _reason_to_skip(run: Run, model: Any) -> str | None:
    """Return the reason to skip the comparison, or None."""
    from harness.engine.stages import bytes_needed, trained  # imports DeepSpeed

    if has_checkpoints(run.plan.config.model.init_from or ""):
        return "the weights are from a checkpoint, whose probe loss was compared"
    verify, device = run.plan.config.layout.verify, run.engine.device
    if verify is False:
        return "layout.verify is false"
    if verify is True:
        return None
    needed, free = bytes_needed(run.plan, model), free_on_host()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // run.plan.world.ranks_per_gpu
    if free is not None and needed > free // 2:
        return f"the undivided model needs {needed / 2**30:.1f} GiB on one rank"
    tokens = run.plan.curriculum.at(0).global_batch * run.plan.seq_len
    flops = 6.0 * tokens * sum(parameter.numel() for parameter in trained(model))
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if flops > _AUTO_FLOPS[device.type] * threads:
        return f"one rank would take {flops:.0e} FLOP for the first batch"
    return None


def _micro_batches(run: Run, share: Share) -> list[Batch]:
    """Return the micro-batches of a share of the first global batch."""
    first = run.plan.curriculum.at(0)
    return run.data.train.micro_batches(
        first, run.plan.micro_batch, share.data_rank, share.data_ranks
    )


def _largest_distance(run: Run) -> dict[str, Any] | None:
    """Return the number of weights whose gradients tensor-parallel ranks have in common, and how
    far they are apart at most; None if they are not finite. Raises ConfigError naming the weights.
    """
    apart: dict[str, float] = {}
    for of_rank in gather_objects(run.engine.gradients_apart()):
        for name, distance in of_rank.items():
            apart[name] = max(distance, apart.get(name, 0.0), key=_finite_last)
    apart = broadcast_object(apart)
    if any(math.isnan(distance) for distance in apart.values()):
        return None  # the step is skipped
    worst = sorted(apart, key=apart.__getitem__, reverse=True)
    if worst and apart[worst[0]] > AGREEMENT:
        named = ", ".join(f"{name} by {apart[name]:.1%}" for name in worst[:4])
        raise ConfigError(
            f"gradients that should be equal on {run.plan.grid.tensor} tensor-parallel ranks "
            f"differ, {named} of the largest element: the tensor-parallel plan of "
            f"{run.plan.config.model.name} omits these weights; use ZeRO 3, and report this"
        )
    return {"weights": len(apart), "apart": apart[worst[0]] if worst else 0.0}


def _finite_last(distance: float) -> float:
    return math.inf if math.isnan(distance) else distance
