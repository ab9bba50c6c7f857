"""Chooses model.kernels, model.compile and train.micro_batch where a run leaves them open.

A plan is first made without fused kernels and compilation, and with the usual micro-batch. Its
estimates choose, and it is made again (make.py). The planner and the tools make the same plans.
"""

import importlib.util
from bisect import bisect_left
from dataclasses import replace
from typing import Any

from harness.config.assignments import CHOSEN
from harness.config.batch import divisors
from harness.config.ds_json import literal
from harness.estimate.fit import Ways, with_micro_batch
from harness.estimate.hardware import half_precision
from harness.estimate.inputs import Inputs
from harness.estimate.step_time.step import StepTime, estimate_time
from harness.estimate.timeline import estimate_memory
from harness.layout.attention_table import ATTENTIONS
from harness.layout.families import compared_families
from harness.plan.batches import steps_of
from harness.plan.duration import step_time
from harness.plan.layers import LIGER_FAMILIES
from harness.plan.machine import missing_for_compile
from harness.plan.plan import Draft, Plan

COMPILE_SECONDS = 180.0
"""Seconds that the first steps of compiled layers take in addition: a guess, for any model."""
HEADROOM = 0.05
"""Share of a GPU that must stay free at the upper end of what is chosen or recommended."""
MOST_TOKENS = 131_072
"""Most tokens of a chosen micro-batch: more gain nothing, and kernels count elements in 32 bits."""
COMPILED_FAMILIES = compared_families("compiled")
"""Families whose compiled layers were compared with the others in the parity gate."""
_KERNELS, _COMPILE, _MICRO_BATCH = "model.kernels", "model.compile", "train.micro_batch"


def choose_or_leave_out(draft: Draft) -> None:
    """Give what the run leaves open ("auto") its chosen value, or the plain one before a choice."""
    model, chosen = draft.config.model, draft.chosen
    values: dict[str, Any] = {}
    if model.kernels == "auto":
        values[_KERNELS] = chosen.get(_KERNELS, "none")
    if model.compile == "auto":
        values[_COMPILE] = chosen.get(_COMPILE, False)
    if values:
        draft.decide(values, CHOSEN)


def take_micro_batch(draft: Draft) -> None:
    """Set the chosen micro-batch, once no pass asks any more what the user set."""
    if _MICRO_BATCH in draft.chosen:
        draft.decide({_MICRO_BATCH: draft.chosen[_MICRO_BATCH]}, CHOSEN)


def choices(plan: Plan, ways: Ways) -> tuple[dict[str, Any], str]:
    """Return the fastest values for what a plain plan leaves open, by key, and a line about them.

    `ways`: the changes that the run's passes accept.
    """
    # By the tables' rates alone: what one node has measured, other nodes may lack.
    estimate, step = plan.estimate, step_time(replace(plan, draft=None))
    if plan.world.accelerator != "cuda" or estimate is None:
        return {}, ""
    inputs, chosen, hint = estimate.inputs, dict[str, Any](), ""
    # Liger computes gradients of the loss before fp16's scale. Older GPUs were not measured.
    is_recent = half_precision(plan.world.gpu) == "bf16" and plan.precision != "fp16"
    if is_recent and _may_be_liger(plan) and ways.accept(f"{_KERNELS}=liger"):
        if _is_here(plan) and not importlib.util.find_spec("liger_kernel"):
            hint = f"{_KERNELS}=none, because liger-kernel is not installed (pip install)"
        else:
            chosen[_KERNELS], inputs = "liger", replace(inputs, liger=True)
    if is_recent and not chosen and step and _pays(plan, step) and ways.accept(f"{_COMPILE}=true"):
        chosen[_COMPILE], inputs = True, replace(inputs, compiled=True)
    if (size := _micro_batch(plan, inputs, estimate.device_bytes, step)) != plan.micro_batch:
        chosen[_MICRO_BATCH], inputs = size, with_micro_batch(inputs, size)
    return chosen, _line(chosen, hint, step, inputs)


def _is_here(plan: Plan) -> bool:
    return plan.draft is not None and plan.draft.here


def _may_be_liger(plan: Plan) -> bool:
    """Return False if the user decided, or family or losses by source exclude these kernels."""
    data = plan.config.data
    has_sources = bool(data.mix) or (data.rehearse is not None and data.rehearse_share > 0)
    is_open = plan.asked.model.kernels == "auto" and not has_sources
    is_open &= plan.config.model.float8 == "none"  # which needs compiled layers
    return is_open and plan.model_config.get("model_type") in LIGER_FAMILIES


def _pays(plan: Plan, step: StepTime) -> bool:
    """Return True if compiled layers save more than COMPILE_SECONDS within the run. On top of
    Liger's kernels they saved 0 and 5 % (docs/performance.md): too little to choose both.
    """
    model, shape = plan.config.model, plan.shape
    if plan.asked.model.compile != "auto" or model.kernels != "none" or shape is None:
        return False
    is_compared = shape.model_type in COMPILED_FAMILIES and ATTENTIONS[model.attention].is_exact
    if not is_compared or (_is_here(plan) and missing_for_compile("cuda")):
        return False
    counts = plan.facts.counts
    steps = steps_of(plan, counts) if counts else plan.steps or 0
    compiled = estimate_time(replace(step.inputs, compiled=True), step.machine)
    return (step.seconds - compiled.seconds) * steps > COMPILE_SECONDS


def _micro_batch(
    plan: Plan, inputs: Inputs, device_bytes: int | None, step: StepTime | None
) -> int:
    """Return the largest micro-batch that fits with HEADROOM, or the fastest of pipeline stages; 1
    if none fits. The plan's if it is not open, if the memory is unknown, or for experts, whose
    balancing loss depends on it.
    """
    accum = literal(plan.deepspeed_given, "gradient_accumulation_steps")
    is_open = plan.config.train.micro_batch is None and accum is None
    if not is_open or device_bytes is None or plan.shape is None or plan.shape.num_experts:
        return plan.micro_batch
    most = max(1, MOST_TOKENS // plan.seq_len)
    rows = plan.curriculum.quantum // plan.grid.data
    sizes = [size for size in divisors(rows) if size <= most]
    limit = int((1 - HEADROOM) * device_bytes)

    def is_too_large(size: int) -> bool:
        estimate = estimate_memory(with_micro_batch(inputs, size), device_bytes)
        return estimate.worst.shown_within(limit).high > limit

    fitting = sizes[: bisect_left(sizes, True, key=is_too_large)] or sizes[:1]
    if plan.grid.pipeline > 1 and step is not None:
        machine = step.machine
        return min(
            fitting, key=lambda n: estimate_time(with_micro_batch(inputs, n), machine).seconds
        )
    return fitting[-1]


def _line(chosen: dict[str, Any], hint: str, step: StepTime | None, inputs: Inputs) -> str:
    """Return what was chosen, and by how much it is faster."""
    line = ", ".join(f"{key}={str(value).lower()}" for key, value in chosen.items())
    if not line:
        return hint
    line += ": chosen for this model and GPU (auto)"
    if step is not None:
        before, after = f"{step.mfu:.0%}", f"{estimate_time(inputs, step.machine).mfu:.0%}"
        line += f", MFU {after} instead of {before}" * (after != before)
    return f"{line}; {hint}" if hint else line
