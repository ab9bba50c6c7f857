"""Run config sections for conducting a run: evaluation, checkpoints, logging, guard, resume."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from harness.config.sections import (
    Count,
    CountOrZero,
    PathText,
    Positive,
    PositiveOrZero,
    Section,
    Text,
)


class EvalConfig(Section):
    """Held-out loss."""

    every: CountOrZero = 50
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    samples: Count = 96
    """Held-out samples in one evaluation, over all ranks."""
    patience: CountOrZero = 0
    """Evaluations in a row without a better held-out loss after which the run ends as done; 0 never
    ends early. The last step is exported; save.keep_best also keeps the best checkpoint."""
    better_by: PositiveOrZero = 0.0
    """Nats by which a held-out loss must beat the best one to count as better."""

    @model_validator(mode="after")
    def _can_end_early(self) -> EvalConfig:
        if self.patience and not self.every:
            raise ValueError("eval.patience needs evaluations: set eval.every above 0")
        if self.better_by and not self.patience:
            raise ValueError("eval.better_by is for eval.patience: set that, too")
        return self


class SaveConfig(Section):
    """Checkpoints and export."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Count = 3
    """Newest checkpoints to keep in the run folder."""
    keep_every: CountOrZero = 0
    """Steps: checkpoints at multiples of this are never deleted; 0 turns this off."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest held-out loss."""
    async_: bool = False
    """Write checkpoints in the background, from a copy in host memory."""
    export: bool = True
    """Export a Hugging Face folder at the end."""


class LogConfig(Section):
    """Metrics."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""


class ProfileConfig(Section):
    """Profiling of a few steps."""

    steps: Text | None = None
    """A:B, e.g. "10:13": trace steps A to B-1 of rank 0, collectives included, and count the FLOPs
    of a forward pass after step B; written to the run folder's profile/. None: no profile."""

    @property
    def window(self) -> tuple[int, int] | None:
        """Steps A and B; None without a profile."""
        first, _, last = (self.steps or "").partition(":")
        return (int(first), int(last)) if self.steps else None

    def problems(self, total_steps: int | None) -> list[str]:
        """Return the problem of a run too short to reach B; `total_steps` is None until counted."""
        if self.window is None or total_steps is None or self.window[1] <= total_steps:
            return []
        return [
            f"profile.steps is {self.steps!r}, but the run ends with step {total_steps}: B of A:B "
            f"may be {total_steps} at most, or set train.steps to {self.window[1]} or more"
        ]

    @field_validator("steps")
    @classmethod
    def _is_window(cls, value: str | None) -> str | None:
        window = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value or "1:2")
        if not window or not 1 <= int(window[1]) < int(window[2]):
            raise ValueError(f"profile.steps is {value!r}: it must be A:B, 1 <= A < B, as in 10:13")
        return value


class SampleConfig(Section):
    """Text sampled from the model at the end."""

    tokens: CountOrZero = 48
    """Length of the sample, tokens; 0 samples nothing."""
    prompt: str | None = None
    """Text that the sample continues; None starts a new document."""


class PipelineConfig(Section):
    """Pipeline settings that the DeepSpeed JSON does not have."""

    verify: bool | Literal["auto"] = "auto"
    """Compare the first batch's loss and gradient norm with the unsplit model's; auto: if one
    rank can hold and run it."""


class PlanConfig(Section):
    """Checks made before a device is used."""

    force: bool = False
    """Run even if the estimate says that the run does not fit."""


class GuardConfig(Section):
    """Reactions to bad steps, diverged replicas, hangs and time limits."""

    max_bad_steps: Count = 10
    """Skipped steps in a row (not finite, or spikes) after which the run stops with code 76; steps
    skipped while fp16 searches for its loss scale do not count."""
    spikes: Literal["log", "skip", "rollback"] = "log"
    """Reaction to a spike of loss or gradient norm: log records an event; skip discards the step;
    rollback returns to the newest checkpoint and skips the samples read since. log checks logged
    steps only; skip and rollback make the host wait for both values in every step."""
    spike_sigma: Positive = 6.0
    """Standard deviations above the mean at which a step counts as a spike."""
    spike_window: Annotated[int, Field(ge=8, le=10**6)] = 128
    """Previous steps (under log: logged steps) that a step is compared with; starts once a quarter
    of them is there."""
    max_rollbacks: CountOrZero = 3
    """Most rollbacks in a run; one more stops it with code 76."""
    replicas_every: CountOrZero = 500
    """Steps between comparisons of the state that all data ranks replicate, also compared before
    every checkpoint; 0 never compares."""
    hang_floor_s: PositiveOrZero = 300.0
    """Seconds: a phase of the loop (data, step, evaluation, save) that lasts longer than this and
    longer than hang_factor times its longest so far is a hang. The run reports all threads' stacks
    and the rank that the others wait for, and ends with code 78. 0 turns the watchdog off."""
    hang_factor: Positive = 10.0
    """Multiple of a phase's longest duration so far at which it counts as a hang."""
    hang_first_s: Positive = 3600.0
    """Seconds allowed for set-up and for the first three times of each phase. Collectives time out
    later (ten minutes more than this, or an hour), so that a hang is reported first."""
    time_limit_s: Positive | None = None
    """Seconds from the start within which the run saves and ends with code 75; None asks Slurm for
    the job's limit."""


class RunFolderConfig(Section):
    """The run folder."""

    dir: PathText | None = None
    """Run folder; None makes a new one under runs/. A folder that holds a run resumes it."""


class ResumeConfig(Section):
    """Starting point of a resumed run, and keys that may change."""

    from_: PathText | None = None
    """RUN or RUN@STEP: branch off another run's checkpoint into a new run.dir."""
    allow: list[str] = Field(default_factory=list)
    """Keys that may differ from the run being resumed: resume.allow=optim.lr,data.path."""

    @field_validator("allow", mode="before")
    @classmethod
    def _as_typed(cls, value: Any) -> Any:
        """Accept keys as plain text: a shell removes a list's quotes, and one key needs no list."""
        return re.findall(r"[\w.]+", value) if isinstance(value, str) else value
