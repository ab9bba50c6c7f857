"""Run config sections on conducting a run: evaluation, checkpoints, logging, guard, resume."""

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
"""Tokens that fit the sentence and the question in any tokenizer."""


class EvalConfig(Section):
    """Evaluation on held-out data."""

    every: CountOrZero = 50
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    samples: Count = 96
    """Held-out windows per evaluation, over all ranks."""
    patience: CountOrZero = 0
    """Consecutive evaluations without a better held-out loss that end the run early, with exit
    code 0; 0 disables this. The last step is exported; save.keep_best also keeps the best
    checkpoint."""
    better_by: PositiveOrZero = 0.0
    """Nats by which a held-out loss must beat the best one to count as better."""
    seq_len: Count | None = None
    """Tokens per held-out window for the loss by position, which may exceed the training length;
    None: data.seq_len."""
    needle_lengths: list[Annotated[int, Field(ge=LEAST_NEEDLE, le=MAX_COUNT)]] = Field(
        default_factory=list
    )
    """Lengths in tokens of held-out texts for the needle-in-a-haystack test (arXiv 2307.03172),
    each with the needle at five depths; []: no test."""

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
    """Number of newest checkpoints to keep in the run folder."""
    keep_every: CountOrZero = 0
    """Never delete checkpoints at multiples of this many steps; 0 disables this."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest held-out loss."""
    async_: bool = False
    """Write checkpoints in the background, from a copy in host memory."""
    export: bool = True
    """Export a Hugging Face folder at the end."""
    merge: bool = False
    """With model.lora: export full weights with the adapters merged in, plus the adapters."""


class LogConfig(Section):
    """Metrics and the report."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    report: bool = True
    """Write report.html to the run folder at evaluations, at most once a minute, and at the end."""
    weights_every: CountOrZero = 10
    """Steps between measurements of param_norm and update_ratio, written with the next line; 0
    disables them."""
    attention_every: CountOrZero = 50
    """Steps between measurements of attention on held-out windows (attention_entropy/LAYER,
    attention_coverage/LAYER), written with the next line; 0 disables them."""

    tensorboard: bool = False
    """Also log to TensorBoard, in tensorboard/ of the run folder (package tensorboard)."""
    wandb: Text | None = None
    """Also log to Weights & Biases: PROJECT or ENTITY/PROJECT (package wandb)."""
    mlflow: Text | None = None
    """Also log to this MLflow experiment, in mlflow/ of the run folder or at MLFLOW_TRACKING_URI
    (package mlflow-skinny or mlflow)."""

    def is_due(self, step: int, every: int) -> bool:
        """Return True for the first metrics line at or after each multiple of `every` steps."""
        is_line = step % self.every == 0
        return is_line and every > 0 and step // every > (step - self.every) // every


class ProfileConfig(Section):
    """Profiling of a few steps."""

    steps: Text | None = None
    """A:B, e.g. "10:13": trace steps A to B-1 of rank 0 with their collectives, and count the FLOPs
    of a forward pass after step B; written to profile/ in the run folder. None: no profile."""

    @property
    def window(self) -> tuple[int, int] | None:
        """Steps A and B; None without a profile."""
        first, _, last = (self.steps or "").partition(":")
        return (int(first), int(last)) if self.steps else None

    def problems(self, total_steps: int | None) -> list[str]:
        """Return a problem if the run is too short to reach B; `total_steps` is None if unknown."""
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
    """Text sampled from the model after training and, if pretrained weights are prompted, also
    before.
    """

    tokens: CountOrZero = 48
    """Tokens to sample; 0 disables sampling. Sampling stops after half a minute."""
    prompt: str | None = None
    """Text for the sample to continue; None: the first held-out prompt or, if no prompts are
    masked, a new document."""


class LayoutConfig(Section):
    """Settings for sharded models that the DeepSpeed JSON lacks."""

    verify: bool | Literal["auto"] = "auto"
    """Compare the first batch's loss and gradient norm with those of the unsharded model; auto: if
    one rank can hold and run it."""


class PlanConfig(Section):
    """Checks made before any device is used."""

    force: bool = False
    """Run even if the estimate says that the run does not fit in memory."""
    rates: str | None = None
    """File of measured rates for predicting the step time (tools/plan_cluster.py --calibrate);
    None: the built-in GPU tables, without a prediction for CPU ranks."""


class GuardConfig(Section):
    """Reactions to bad steps, diverged replicas, hangs and time limits."""

    max_bad_steps: Count = 10
    """Consecutive skipped steps (non-finite or spikes) after which the run stops with code 76;
    steps that fp16 skips to find its loss scale do not count."""
    spikes: Literal["log", "skip", "rollback"] = "log"
    """Reaction to a spike in loss or gradient norm: log records an event; skip discards the step;
    rollback returns to the newest checkpoint and skips the samples read since. log checks only
    logged steps; skip and rollback make the host wait for both values in every step."""
    spike_sigma: Positive = 6.0
    """Standard deviations above the mean at which a step counts as a spike."""
    spike_window: Annotated[int, Field(ge=8, le=10**6)] = 128
    """Number of previous steps (of logged steps, under log) to compare a step with; checks start
    once a quarter of them are available."""
    max_rollbacks: CountOrZero = 3
    """Maximum rollbacks per run; one more stops the run with code 76."""
    replicas_every: CountOrZero = 500
    """Steps between comparisons of replicated weights across ranks, which are also compared before
    every checkpoint; 0 disables all comparisons."""
    hang_floor_s: PositiveOrZero = 300.0
    """Seconds: a phase of the loop (data, step, evaluation, save) counts as a hang if it lasts
    longer than this and longer than hang_factor times its longest duration so far. The run reports
    all threads' stacks and the rank that the others wait for, and ends with code 78. 0 disables the
    watchdog."""
    hang_factor: Positive = 10.0
    """Multiple of a phase's longest duration so far at which it counts as a hang."""
    hang_first_s: Positive = 3600.0
    """Seconds allowed for start-up and for the first three runs of each phase. Collectives time out
    later, ten minutes after this or after an hour, whichever is longer, so that a hang is reported
    first."""
    time_limit_s: Positive | None = None
    """Seconds from the start within which the run saves and ends with code 75; None: the Slurm
    job's time limit."""


class RunFolderConfig(Section):
    """The run folder."""

    dir: PathText | None = None
    """Run folder; None: a new one under runs/. A folder that holds a run resumes it."""


class ResumeConfig(Section):
    """Starting point of a resumed run, and keys that may differ."""

    from_: PathText | None = None
    """RUN or RUN@STEP: start from another run's checkpoint, in a new run.dir."""
    allow: list[str] = Field(default_factory=list)
    """Keys that may differ from the resumed run: resume.allow=optim.lr,data.path."""

    @field_validator("allow", mode="before")
    @classmethod
    def _as_typed(cls, value: Any) -> Any:
        """Accept keys as plain text: a shell strips a list's quotes, and one key needs no list."""
        return re.findall(r"[\w.]+", value) if isinstance(value, str) else value
