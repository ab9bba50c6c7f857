"""Types shared by all sections of the run config, and the sections that control a run: length,
evaluation, checkpoints, logging, guard, resume.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from harness.config.batch import Curriculum
from harness.files.paths import expanded_path

# At most one of these keys may be set.
LENGTHS = ("train.steps", "train.tokens", "train.epochs")
DEFAULT_STEPS = 100

MAX_COUNT = 2**53
"""Largest count that a float holds without rounding."""
MAX_SAMPLES = 2**31 - 1


def _whole(value: object) -> object:
    """Return a whole float as an integer: TOML and JSON read 300e9 as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_COUNT)]
Samples = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=MAX_SAMPLES)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
NAME_PATTERN = r"[\w.-]{1,64}"
"""Pattern of names that appear in metric keys."""


def _path(value: str) -> str:
    try:
        return expanded_path(value)
    except ValueError as error:
        raise PydanticCustomError("path", "{problem}", {"problem": str(error)}) from None


PathText = Annotated[Text, AfterValidator(_path)]
"""A path with `~` expanded, which shells do not do after "="; hub ids and preset names stay
unchanged."""


RECORDED = {"recorded": True}
"""Context of validating a stored config: it may name rows that a file (run.code) added then."""


def name_in(table: Mapping[str, Any], *more: str) -> PlainValidator:
    """Return the validator of a key that names a row of a table, to which run.code adds others."""

    def check(value: object, info: ValidationInfo) -> str:
        names = [*more, *table]
        if isinstance(value, str) and (value in names or info.context == RECORDED):
            return value
        first, last = ", ".join(map(repr, names[:-1])), repr(names[-1])
        expected = f"{first} or {last}" if first else last
        raise PydanticKnownError("literal_error", {"expected": expected})

    return PlainValidator(check)


LOSSES = {"cross_entropy": "of the next token, in nats"}
"""Training losses by name (models/loss.py); those of run.code get all logits."""


def key_of(field: str) -> str:
    """Return the key of a field: save.async is `async_` in Python."""
    return field.removesuffix("_")


class Section(BaseModel):
    """Strict, frozen section of the run config; its fields' docstrings are their help texts."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        alias_generator=key_of,
        serialize_by_alias=True,
    )


@functools.cache
def help_texts(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each field on one line.

    pydantic would do this with use_attribute_docstrings, but for every section at every start.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    texts = {}
    for field, text in itertools.pairwise(getattr(tree, "body", [])):
        match field, text:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(value))):
                texts[name] = " ".join(value.split())
    return texts


NEXT_TOKEN = "next_token"
BETAS = {"dpo": 0.1, "ipo": 0.1, "orpo": 0.1, "simpo": 2.0}
"""Objectives of preference pairs, with the usual train.beta of each."""
REFERENCE_FREE = ("orpo", "simpo")
"""Those that do not compare with the initial weights."""
_MARGIN = 0.5  # of simpo


class TrainConfig(Section):
    """Length of the run and size of its steps."""

    steps: CountOrZero | None = None
    """Optimizer steps; 0 only evaluates and exports. Set at most one of steps, tokens and epochs;
    with none of them a run has 100 steps, or 1 to 15 epochs with model.init_from
    (docs/models.md)."""
    tokens: Count | None = None
    """Tokens to train on, rounded up to whole steps."""
    epochs: Positive | None = None
    """Passes over the train split, rounded up to whole steps."""
    global_batch: Samples = 48
    """Windows per optimizer step, over all ranks: packed windows of data.seq_len tokens, or single
    examples (data.batching). The default is rounded up to a multiple of data ranks x micro-batch x
    accumulation; with model.init_from it is lower if the data would give fewer than 100 steps."""
    micro_batch: Samples | None = None
    """Windows per rank and forward pass; None: the largest divisor <= 8 of global_batch / data
    ranks."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Random seed of initial weights, data order and dropout."""
    objective: Literal[NEXT_TOKEN, *BETAS] = NEXT_TOKEN  # type: ignore[valid-type]
    """next_token; or, for pairs of a chosen and a rejected answer, dpo, ipo, orpo or simpo
    (docs/preferences.md). data.seq_len is then the length of a pair, and losses are means over
    pairs."""
    beta: Positive | None = None
    """Strength of a preference objective: of its pull to the initial weights (dpo, ipo), of its
    odds (orpo), or of its rewards (simpo); None: 0.1, for simpo 2."""
    margin: PositiveOrZero | None = None
    """With simpo: reward by which the chosen side should lead; None: 0.5."""
    sft_weight: PositiveOrZero = 0.0
    """With a preference objective: weight of the chosen side's mean cross-entropy, which is added
    to the loss (arXiv 2404.19733)."""
    loss: Annotated[str, name_in(LOSSES)] = "cross_entropy"
    """Training loss: cross_entropy, or one of run.code; held-out losses stay cross-entropy."""
    label_smoothing: Probability = 0.0
    """Share of a target's probability that is spread over the vocabulary (arXiv 1512.00567); not
    applied to the held-out loss."""
    carry_state: bool = False
    """For recurrent models and Mamba-2: carry the state, but no gradients, from one window of
    data.seq_len tokens to the next (truncated back-propagation through time). The rows of batches
    and evaluations are then contiguous streams of text, in data order."""

    @property
    def preferences(self) -> str:
        """The objective if it compares pairs, otherwise ""."""
        return self.objective if self.objective in BETAS else ""

    @property
    def beta_used(self) -> float:
        """`beta` if it is set, otherwise the objective's usual value."""
        return BETAS.get(self.objective, 0.0) if self.beta is None else self.beta

    @property
    def margin_used(self) -> float:
        """`margin` if it is set, otherwise the usual value."""
        return _MARGIN if self.margin is None else self.margin

    def num_steps(self, curriculum: Curriculum, seq_len: int) -> int | None:
        """Return the number of optimizer steps; None with epochs, until the data is counted."""
        if self.epochs is not None:
            return None
        if self.tokens is not None:
            return curriculum.steps_for(math.ceil(self.tokens / seq_len))
        return DEFAULT_STEPS if self.steps is None else self.steps

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        lengths = [k for k in LENGTHS if getattr(self, k.removeprefix("train.")) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} exclude each other: keep one")
        return self


class RampConfig(Section):
    """Smaller batches and shorter sequences at the start; every window is still read once."""

    batch_from: Samples | None = None
    """Windows in the first step; the batch grows to train.global_batch over ramp.batch_tokens."""
    batch_step: Samples | None = None
    """Windows added by each increase; None: batch_from."""
    batch_tokens: Count | None = None
    """Tokens over which the batch grows, in equal parts."""
    length_from: Annotated[int, Field(ge=2)] | None = None
    """Tokens per sequence at first; the length doubles up to data.seq_len over ramp.length_tokens.
    Each window is split into several sequences, so the tokens per step stay the same."""
    length_tokens: Count | None = None
    """Tokens over which sequences grow, in equal parts."""


LEAST_NEEDLE = 128
"""Minimum length in tokens: the sentence and the question fit in any tokenizer."""


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
    """Text sampled from the model after training and, with model.init_from and a prompt, also
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
    longer than this and longer than hang_factor times its longest recent duration. The run reports
    all threads' stacks and the rank that the others wait for, and ends with code 78. 0 disables the
    watchdog."""
    hang_factor: Positive = 10.0
    """Multiple of a phase's longest recent duration at which it counts as a hang."""
    hang_first_s: Positive = 3600.0
    """Seconds allowed for start-up and for the first three runs of each phase. Collectives time out
    ten minutes later than this, and not before 70 minutes, so that a hang is reported first."""
    time_limit_s: Positive | None = None
    """Seconds from the start by which the run ends with code 75; None: the Slurm job's limit."""
    budget_gpu_hours: Positive | None = None
    """GPU hours of all starts after which the run exports and ends with code 79; None: no limit."""


class RunFolderConfig(Section):
    """The run folder, whose run it is, and who is told."""

    dir: PathText | None = None
    """Run folder; None: a new one under runs/. A folder that holds a run resumes it."""
    owner: Text | None = None
    """Name that lists of runs and notifications show; None: the user who starts the run."""
    code: PathText | None = None
    """Python file with optimizers, losses, attentions, schedules or metrics of your own
    (docs/own_code.md). It runs only if a start's own arguments, or their config file, name it."""
    notify: Text | None = None
    """Whom to tell of starts, ends, hangs: an http(s) address, a command, FILE.prom; see docs."""


class OwnConfig(Section):
    """Values for the functions of run.code, by the names of their parameters."""

    model_config = ConfigDict(extra="allow")

    @property
    def given(self) -> dict[str, Any]:
        """The values by key."""
        return self.model_extra or {}


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
