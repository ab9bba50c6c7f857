"""The sections of the run config that say what is learned: keys, types, defaults, meanings."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from harness.config.curriculum import Curriculum
from harness.files.paths import expanded_path

# Keys of which at most one may be given.
LENGTHS = ("train.steps", "train.tokens", "train.epochs")
DEFAULT_STEPS = 100

MAX_COUNT = 2**53
"""Up to here a float counts without rounding."""
MAX_SAMPLES = 2**31 - 1

Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Samples = Annotated[int, Field(gt=0, le=MAX_SAMPLES)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def _path(value: str) -> str:
    try:
        return expanded_path(value)
    except ValueError as error:
        raise PydanticCustomError("path", "{problem}", {"problem": str(error)}) from None


PathText = Annotated[Text, AfterValidator(_path)]
"""A path with its `~` expanded, as no shell does behind a "="; a hub id or a preset's name, which
it may be, too, stays as it is."""


def key_of(field: str) -> str:
    """The key of a field: save.async is Python's `async_`."""
    return field.removesuffix("_")


class Section(BaseModel):
    """Strict and frozen; what its fields say of themselves is their help."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        alias_generator=key_of,
        serialize_by_alias=True,
    )


class ModelConfig(Section):
    """The decoder to train."""

    name: PathText = "tiny"
    """Its shape only: a preset, a config.json, a folder that holds one, or a hub id."""
    init_from: PathText | None = None
    """Folder, hub id, or RUN or RUN@STEP of ours, whose weights to start from; None: fresh ones."""
    checkpointing: Literal["none", "full"] = "none"
    """Recompute activations in the backward pass: of no layer, or of every decoder layer."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation, by its Hugging Face name."""
    kernels: Literal["none", "liger"] = "none"
    """liger: fused RMSNorm, SwiGLU, and head with cross-entropy, of the package liger-kernel."""
    compile: bool = False
    """Compile every decoder layer (torch.compile); the first steps take minutes."""
    dropout: Probability | None = None
    """Sets every dropout probability of the model; None keeps the model config's own."""
    attention_dropout: Probability | None = None
    """That of attention weights alone; None: as `dropout` says."""
    embedding_dropout: Probability | None = None
    """That of embeddings alone, in families that have one."""
    residual_dropout: Probability | None = None
    """That of what layers add to the residual, in families that have one."""
    stochastic_depth: Probability = 0.0
    """Probability that the last decoder layer is left out of a training sample, rising to it evenly
    over the layers."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Hugging Face config keys to change, e.g. model.overrides.num_hidden_layers=2."""


class DataConfig(Section):
    """What it reads."""

    path: PathText | None = None
    """Text, .jsonl, a folder of them, or a .bin/.idx pair; None reads Python's own library."""
    format: Literal["text", "jsonl"] | None = None
    """What its files are, whatever they are called; None: what their names say."""
    tokenizer: PathText | None = None
    """Folder or hub id of a Hugging Face tokenizer; None trains one, or uses the corpus's."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SAMPLES)] = 128
    """Length of a sample, tokens."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the documents kept for evaluation."""
    document_mask: bool | None = None
    """Tokens attend only within their own document; None: on for prompt/completion data."""
    cache_dir: PathText | None = None
    """Where tokenised corpora are kept; None is the user's cache folder."""
    prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    """Batches prepared ahead of the step that needs them."""


class TrainConfig(Section):
    """How long, and how much a step."""

    steps: CountOrZero | None = None
    """Optimizer steps, 0 only evaluates and exports; at most one of steps, tokens and epochs may
    be given, and without any of them a run has 100 steps."""
    tokens: Count | None = None
    """Tokens to train on, rounded up to whole steps."""
    epochs: Positive | None = None
    """Passes over the training split, rounded up to whole steps."""
    global_batch: Samples = 48
    """Samples per optimizer step over all ranks."""
    micro_batch: Samples | None = None
    """Samples a rank takes at once; None: the largest divisor of global_batch / data ranks <= 8."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights, the data order and dropout."""
    label_smoothing: Probability = 0.0
    """Share of a target's probability that is spread over the vocabulary (arXiv 1512.00567); the
    held-out loss is without."""

    def num_steps(self, curriculum: Curriculum, seq_len: int) -> int | None:
        """Optimizer steps of the run; None under epochs, until the data is counted."""
        if self.epochs is not None:
            return None
        if self.tokens is not None:
            return curriculum.steps_for(math.ceil(self.tokens / seq_len))
        return DEFAULT_STEPS if self.steps is None else self.steps

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        given = [k for k in LENGTHS if getattr(self, k.removeprefix("train.")) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: keep one")
        return self


class RampConfig(Section):
    """Smaller batches and shorter sequences at the start. Nothing is read twice or left out."""

    batch_from: Samples | None = None
    """Samples of the first step, which rise to train.global_batch over ramp.batch_tokens."""
    batch_step: Samples | None = None
    """Samples by which they rise at a time; None: batch_from."""
    batch_tokens: Count | None = None
    """Tokens over which they rise, in equal parts."""
    length_from: Annotated[int, Field(ge=2)] | None = None
    """Tokens of the first sequences, which double to data.seq_len over ramp.length_tokens: a sample
    is read as several of them, and a step keeps its tokens."""
    length_tokens: Count | None = None
    """Tokens over which they double, in equal parts."""
