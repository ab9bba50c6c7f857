"""Layouts with their memory in bytes and their step time in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.config.run_config import RunConfig
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.job import DAY, EvalAndSaveTime, Job
from harness.estimate.step_time.machine import Machine
from harness.estimate.step_time.step import StepTime
from harness.estimate.timeline import Estimate
from harness.plan.duration import beside_of
from tools.cluster.layouts import Layout, State

TOKENS_PER_PARAMETER = 20
"""Tokens per parameter to train on if the job has no length (arXiv 2203.15556)."""


@dataclass(eq=False)
class Counted:
    """A layout with its memory and its time."""

    layout: Layout
    question: Question
    memory: Estimate
    time: StepTime
    fits: bool | None = field(init=False)
    """True if GPU and host can hold it; None if the allocator decides and was not simulated yet."""

    def __post_init__(self) -> None:
        self.fits = self.fits_by_bounds

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.time.seconds

    @property
    def inputs(self) -> Inputs:
        """Inputs of the layout's estimates."""
        return self.memory.inputs

    @cached_property
    def fits_by_bounds(self) -> bool | None:
        """True if it fits with any allocator, False if with none; None if the allocator decides."""
        if self.missing_host_bytes:
            return False
        verdict = self.memory.worst.verdict_by_bounds(self.question.device_bytes)
        return None if verdict is None else verdict == "fits"

    def decide(self) -> bool:
        """Return True if it fits. Simulates the allocator if the bounds do not decide."""
        if self.fits is None:
            self.fits = self.memory.verdict == "fits"
        return self.fits

    @cached_property
    def refusal(self) -> str:
        """Reason why train.py would reject it; "" if it accepts it. Makes its plan."""
        return self.question.refusal(self.layout)

    @property
    def answers(self) -> bool:
        """True if it fits and is not known to be rejected."""
        return bool(self.fits) and self.trained is not False

    @property
    def trained(self) -> bool | None:
        """True if train.py accepts it; None if its plan was not made."""
        return not self.refusal if "refusal" in vars(self) else None

    @property
    def peak_bytes(self) -> int:
        """Minimum bytes that the fullest GPU needs."""
        return self.memory.needed

    @property
    def missing_bytes(self) -> int:
        """Bytes by which it exceeds the GPU's memory."""
        high = self.peak_bytes
        if self.fits is False and self.fits_by_bounds is None:
            high = self.peak_interval[1]
        return max(0, high - self.question.device_bytes)

    @property
    def missing_host_bytes(self) -> int:
        """Bytes by which it exceeds a node's host memory."""
        return max(0, self.memory.host_bytes_per_node - self.question.host_bytes)

    def is_usable(self) -> bool:
        """Return True if train.py accepts it and it fits. Makes its plan; see `decide`."""
        return self.is_affordable and not self.refusal and self.decide()

    @property
    def is_affordable(self) -> bool:
        """True if the job's cost is within the budget."""
        question = self.question
        return not question.budget or question.cost(self) <= question.budget

    def may_have_room(self, share: float) -> bool:
        """Return False if no allocator could leave this share of the GPU free."""
        return self.peak_bytes <= (1 - share) * self.question.device_bytes

    def has_room(self, share: float) -> bool:
        """Return True if this share of the GPU stays free at the upper end of its memory."""
        return self.peak_interval[1] <= (1 - share) * self.question.device_bytes

    def why_it_does_not_fit(self) -> str:
        """Return the reason why it is not an answer, or may not be one; "" if it is one."""
        if self.trained is False:
            return f"rejected: {self.refusal}"
        if self.missing_host_bytes:
            return f"{self.missing_host_bytes / GIB:.0f} GiB too much for the host memory of a node"
        if self.fits is False:
            worst = self.memory.worst
            place = f" on stage {worst.stage}" if self.layout.pipeline > 1 else ""
            sizes = worst.phase(worst.peak_phase)
            name, size = max(sizes.items(), key=lambda size: size[1])
            return (
                f"{max(self.missing_bytes, 2**20) / GIB:.1f} GiB too much{place}: "
                f"{size / GIB:.1f} of {name}"
            )
        if not self.is_affordable:
            return f"costs {self.question.cost(self):,.0f}, more than the budget"
        return "" if self.fits else "may not fit"

    @property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed JSON of the layout."""
        return self.question.deepspeed(self.layout)

    def to_json(self, job: Job, price: float | None) -> dict[str, Any]:
        """Return the layout as plain values, bytes in GiB."""
        low, high = self.peak_interval
        beside = self.question.beside(self)
        return {
            "deepspeed": self.deepspeed,
            "overrides": self.layout.overrides,
            "fits": bool(self.fits),
            "decided": self.fits is not None,
            "peak_gib": [round(low / GIB, 3), round(high / GIB, 3)],
            "host_gib": round(self.memory.host_bytes_per_node / GIB, 3),
            **self.time.to_json(),
            "gpu_hours": round(job.gpu_hours, 1),
            "evaluation_s": round(beside.evaluating, 1),
            "save_s": round(beside.save_seconds, 2),
            "cost": None if price is None else round(job.cost(price), 2),
            "trained": self.trained,
        }

    @property
    def peak_interval(self) -> tuple[int, int]:
        """Bytes of the fullest GPU as its driver shows them: bounds, equal if it does not fit."""
        if self.fits_by_bounds is False:
            return self.peak_bytes, self.peak_bytes
        if self.fits is not None and self.fits_by_bounds is None:
            return self.memory.worst.shown_within(self.question.device_bytes)
        return self.memory.worst.loose


@dataclass(frozen=True)
class Question:
    """A job to plan: its model, tokens and GPUs, and the price."""

    base: dict[State, Inputs]
    """Inputs by entry of STATES that train.py accepts, for one model, sequence length and
    machine."""
    machine: Machine
    gpus: int
    device_bytes: int
    host_bytes: int
    global_batch: int
    data_tokens: float
    price: float | None
    budget: float | None
    """The most that the job may cost, if it has a price."""
    run: RunConfig
    disk_gb_per_s: float
    """Write bandwidth per node for checkpoints."""
    compiles: bool
    """True if model.compile=auto compiles layers of this job that have no Liger kernels."""
    deepspeed: Callable[[Layout], dict[str, Any]]
    """Returns the DeepSpeed JSON of a layout, with the keys of the command line."""
    refusal: Callable[[Layout], str]
    """Returns the reason why train.py would reject a layout; "" if it accepts it."""

    @property
    def some(self) -> Inputs:
        """Inputs of any one entry, for the fields that all entries share."""
        return next(iter(self.base.values()))

    def inputs(self, layout: Layout) -> Inputs:
        """Return the inputs of a layout's estimates, with what train.py chooses (plan/speed.py)."""
        base, model = self.base[layout.state], self.run.model
        liger, compiled = base.liger, base.compiled
        if model.kernels == "auto":
            liger &= layout.takes_liger
        if model.compile == "auto":
            compiled = self.compiles and layout.can_compile and not liger
            compiled &= not (base.dropout and layout.tensor > 1)
        return layout.inputs(base, self.gpus, self.global_batch, liger, compiled)

    def job(self, counted: Counted) -> Job:
        """Return the whole job with a layout."""
        beside = self.beside(counted)
        return Job(
            self.steps(counted) * counted.seconds + beside.evaluating,
            *(self.gpus, self.machine.watts, beside.save_seconds),
            saves=beside.saves,
        )

    def cost(self, counted: Counted) -> float:
        """Return what the job costs with a layout; in GPU-hours without a price."""
        return self.job(counted).cost(self.price or 1.0)

    def steps(self, counted: Counted) -> float:
        """Return the number of steps of the whole job."""
        return self.data_tokens / counted.time.tokens

    def beside(self, counted: Counted) -> EvalAndSaveTime:
        """Return the evaluations and saves of the whole job with a layout."""
        return beside_of(self.run, counted.time, self.steps(counted), self.disk_gb_per_s)


def days(seconds: float) -> str:
    """Return seconds as text in days or hours."""
    return f"{seconds / DAY:,.1f} days" if seconds >= DAY else f"{seconds / 3600:.1f} hours"
