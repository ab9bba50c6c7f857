"""The sections of the run config that say how a run is conducted: watched, saved, resumed."""

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
    """Evaluations without a better held-out loss that end the run as done; 0 trains to the end.
    What is exported is the last step: save.keep_best keeps the best of what save.every saves."""
    better_by: PositiveOrZero = 0.0
    """Nats by which a loss has to be lower than the best to be better."""

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
    """Checkpoints kept in the run folder."""
    keep_every: CountOrZero = 0
    """Steps: checkpoints of multiples of it are kept for good; 0 keeps none for that."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest held-out loss."""
    async_: bool = False
    """Write while training goes on, from a copy in host memory."""
    export: bool = True
    """Write a Hugging Face folder at the end."""


class LogConfig(Section):
    """The metrics."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""


class ProfileConfig(Section):
    """A closer look at a few steps."""

    steps: Text | None = None
    """A:B, e.g. "10:13": a torch trace of rank 0 in steps A to B-1, collectives included; after
    step B the FLOPs of a forward pass; in the run folder's profile/. None: nothing."""

    @property
    def window(self) -> tuple[int, int] | None:
        """A and B."""
        first, _, last = (self.steps or "").partition(":")
        return (int(first), int(last)) if self.steps else None

    def problems(self, total_steps: int | None) -> list[str]:
        """What keeps a run of that many steps from reaching B; None where that is not known yet."""
        if self.window is None or total_steps is None or self.window[1] <= total_steps:
            return []
        return [
            f"profile.steps is {self.steps!r}, but the run ends with step {total_steps}: B of A:B "
            f"may be {total_steps} at most, or set train.steps to {self.window[1]} or more"
        ]

    @field_validator("steps")
    @classmethod
    def _is_window(cls, value: str | None) -> str | None:
        found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value or "1:2")
        if not found or not 1 <= int(found[1]) < int(found[2]):
            raise ValueError(f"profile.steps is {value!r}: it must be A:B, 1 <= A < B, as in 10:13")
        return value


class SampleConfig(Section):
    """The text sampled from the model at the end."""

    tokens: CountOrZero = 48
    """Its length, tokens; 0 samples nothing."""
    prompt: str | None = None
    """What it continues; None begins a document."""


class PipelineConfig(Section):
    """What is done beside the JSON's pipeline.stages."""

    verify: bool | Literal["auto"] = "auto"
    """Compare the first batch's loss and gradient norm with the unsplit model's; auto: where one
    rank can hold and run it."""


class PlanConfig(Section):
    """What is checked before a device is touched."""

    force: bool = False
    """Run although the estimate says that it does not fit."""


class GuardConfig(Section):
    """What is done when training goes wrong."""

    max_bad_steps: Count = 10
    """Skipped steps in a row (not finite, or spikes) after which the run stops with code 76; those
    in which fp16 looks for its loss scale do not count."""
    spikes: Literal["log", "skip", "rollback"] = "log"
    """What a jump of loss or gradient norm leads to: log, an event; skip, the step is thrown away;
    rollback, back to the newest checkpoint and past the samples since. log looks at logged steps
    alone; for the others the host reads both values in every step, and waits for them."""
    spike_sigma: Positive = 6.0
    """Standard deviations above the mean from which a step is a spike."""
    spike_window: Annotated[int, Field(ge=8, le=10**6)] = 128
    """Steps (under log: logged ones) that a step is compared with, once a quarter is there."""
    max_rollbacks: CountOrZero = 3
    """Rollbacks of a run; one more stops it with code 76."""
    replicas_every: CountOrZero = 500
    """Steps between comparisons of what all data ranks hold in common, which also come before every
    checkpoint; 0 never compares."""
    hang_floor_s: PositiveOrZero = 300.0
    """A phase of the loop (data, step, evaluation, save) that lasts this many seconds, and
    hang_factor times as long as it ever did, is a hang: all threads' stacks, the rank that holds
    the others up, code 78. 0 watches nothing."""
    hang_factor: Positive = 10.0
    """How many times as long as before is too long."""
    hang_first_s: Positive = 3600.0
    """Seconds that a phase may take the first three times, and the set-up. Collectives wait longer
    for a rank, ten minutes more than this or an hour, so that a hang is reported."""
    time_limit_s: Positive | None = None
    """Seconds from the start in which the run has to have saved and ended, with code 75; None asks
    Slurm, where it runs in a job."""


class RunFolderConfig(Section):
    """Where the run lives."""

    dir: PathText | None = None
    """Run folder; None makes a new one under runs/. A folder that holds a run resumes it."""


class ResumeConfig(Section):
    """What a run goes on from, and what may change."""

    from_: PathText | None = None
    """RUN or RUN@STEP: branch off another run's checkpoint into a new run.dir."""
    allow: list[str] = Field(default_factory=list)
    """Keys that may differ from the run being resumed: resume.allow=optim.lr,data.path."""

    @field_validator("allow", mode="before")
    @classmethod
    def _as_typed(cls, value: Any) -> Any:
        """In a shell a list loses its quotes, and one key needs no list."""
        return re.findall(r"[\w.]+", value) if isinstance(value, str) else value
