"""Run config sections for conducting a run: evaluation, checkpoints, logging, guard, resume."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from harness.config.sections import (
    MAX_COUNT,
    Count,
    CountOrZero,
    PathText,
    Positive,
    PositiveOrZero,
    Section,
    Text,
)

LEAST_NEEDLE = 128
"""Tokens that hold sentence and question in any tokenizer."""


class EvalConfig(Section):
    """Held-out loss."""

    every: CountOrZero = 50
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    samples: Count = 96
    """Held-out windows in one evaluation, over all ranks."""
    patience: CountOrZero = 0
    """Evaluations in a row without a better held-out loss after which the run ends as done; 0 never
    ends early. The last step is exported; save.keep_best also keeps the best checkpoint."""
    better_by: PositiveOrZero = 0.0
    """Nats by which a held-out loss must beat the best one to count as better."""
    seq_len: Count | None = None
    """Tokens of the held-out windows whose loss by position is measured, for more positions than
    are trained; None: data.seq_len."""
    needle_lengths: list[Annotated[int, Field(ge=LEAST_NEEDLE, le=MAX_COUNT)]] = Field(
        default_factory=list
    )
    """Tokens of held-out texts in which an evaluation hides a sentence and asks for its number at
    the end (arXiv 2307.03172), each length at five depths; []: none."""

    @model_validator(mode="after")
    def _is_whole(self) -> EvalConfig:
        if len({*self.needle_lengths}) < len(self.needle_lengths):
            raise ValueError("eval.needle_lengths names a length twice")
        if self.patience and not self.every:
            raise ValueError("eval.patience needs evaluations: set eval.every above 0")
        if self.better_by and not self.patience:
            raise ValueError("eval.better_by is for eval.patience: set eval.patience, too")
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
    merge: bool = False
    """With model.lora: export weights that the adapters are added to, and the adapters within."""


class LogConfig(Section):
    """Metrics."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    report: bool = True
    """Write report.html into the run folder: at evaluations, once a minute at most, and at the
    end."""
    weights_every: CountOrZero = 10
    """Steps between measurements of param_norm and update_ratio, written with the next line; 0
    never measures."""
    attention_every: CountOrZero = 50
    """Steps between looks at attention on held-out windows (attention_entropy/LAYER,
    attention_coverage/LAYER), written with the next line; 0 never looks."""

    tensorboard: bool = False
    """Also write metrics for TensorBoard, into the run folder's tensorboard/ (package
    tensorboard)."""
    wandb: Text | None = None
    """Also write metrics to Weights & Biases: PROJECT or ENTITY/PROJECT (package wandb)."""
    mlflow: Text | None = None
    """Also write metrics to MLflow: the EXPERIMENT; into the run folder's mlflow/, or to
    MLFLOW_TRACKING_URI (package mlflow-skinny or mlflow)."""

    def is_due(self, step: int, every: int) -> bool:
        """Return True for the first line of metrics at or after each multiple of `every` steps."""
        is_line = step % self.every == 0
        return is_line and every > 0 and step // every > (step - self.every) // every


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
        within = f"{max(1, min(self.window[0], total_steps - 1))}:{total_steps}"
        shorter = f", or profile.steps={within}" if total_steps > 1 else ""
        return [
            f"profile.steps is {self.steps!r}, but the run ends with step {total_steps}: set "
            f"train.steps to {self.window[1]} or more{shorter}"
        ]

    @field_validator("steps")
    @classmethod
    def _is_window(cls, value: str | None) -> str | None:
        window = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value or "1:2")
        if not window or not 1 <= int(window[1]) < int(window[2]):
            raise ValueError(f"profile.steps is {value!r}: it must be A:B, 1 <= A < B, as in 10:13")
        return value


class SampleConfig(Section):
    """Text sampled from the model at the end; where given weights are asked something, before
    training, too.
    """

    tokens: CountOrZero = 48
    """Length of the sample, tokens; 0 samples nothing. None lasts longer than half a minute."""
    prompt: str | None = None
    """Text that the sample continues; None answers the first held-out prompt, or where nothing is
    masked starts a new document."""


class LayoutConfig(Section):
    """Settings of a divided model that the DeepSpeed JSON does not have."""

    verify: bool | Literal["auto"] = "auto"
    """Compare the first batch's loss and gradient norm with the undivided model's; auto: if one
    rank can hold and run it."""


class PlanConfig(Section):
    """Checks made before a device is used."""

    force: bool = False
    """Run even if the estimate says that the run does not fit."""
    rates: str | None = None
    """File of a site's rates (tools/plan_cluster.py --calibrate), with which the time of a step is
    predicted; None takes the tables of GPUs, and predicts nothing on CPU ranks."""


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
    """Steps between comparisons of the weights that several ranks hold alike, also compared before
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
