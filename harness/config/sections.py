"""Run config sections for model, data, batch and length: keys, types, defaults, meanings."""

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
from harness.layout.attentions import ATTENTIONS

# At most one of these keys may be set.
LENGTHS = ("train.steps", "train.tokens", "train.epochs")
DEFAULT_STEPS = 100

MAX_COUNT = 2**53
"""Largest count that a float holds without rounding."""
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
"""A path with its `~` expanded, which shells do not do after a "="; a hub id or preset name is
unchanged."""


def key_of(field: str) -> str:
    """Return the key of a field: save.async is Python's `async_`."""
    return field.removesuffix("_")


class Section(BaseModel):
    """Strict and frozen section of the run config; its fields' docstrings are their help texts."""

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
    """Shape of the model (no weights): a preset, a config.json, a folder with one, or a hub id."""
    init_from: PathText | None = None
    """Initial weights: a folder, a hub id, or a run of ours as RUN or RUN@STEP; None: random."""
    checkpointing: Literal["none", "full"] = "none"
    """Activation checkpointing: of no layer, or of every decoder layer."""
    attention: Literal[tuple(ATTENTIONS)] = "sdpa"  # type: ignore[valid-type]
    """Attention implementation, by its Hugging Face name."""
    kernels: Literal["none", "liger"] = "none"
    """liger: fused RMSNorm, SwiGLU, and head with cross-entropy, from the package liger-kernel."""
    compile: bool = False
    """Compile every decoder layer (torch.compile); the first steps take minutes."""
    dropout: Probability | None = None
    """Every dropout probability of the model; None keeps those of the model config."""
    attention_dropout: Probability | None = None
    """Dropout probability of attention weights; None: the same as `dropout`."""
    embedding_dropout: Probability | None = None
    """Dropout probability of embeddings, in families that have one."""
    residual_dropout: Probability | None = None
    """Dropout probability of the residual branches, in families that have one."""
    stochastic_depth: Probability = 0.0
    """Probability that a training sample skips the last decoder layer; it rises linearly over the
    layers."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Hugging Face config keys to change, e.g. model.overrides.num_hidden_layers=2."""


class DataConfig(Section):
    """Training data."""

    path: PathText | None = None
    """Text, .jsonl, a folder of them, or a .bin/.idx pair; None: Python's own standard library."""
    format: Literal["text", "jsonl"] | None = None
    """Format of the files, whatever their names; None: by file name."""
    tokenizer: PathText | None = None
    """Folder or hub id of a Hugging Face tokenizer; None: the corpus's own, or train one."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SAMPLES)] = 128
    """Length of a sample, tokens."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the documents kept for evaluation."""
    document_mask: bool | None = None
    """Tokens attend only within their document; None: only for prompt/completion data."""
    cache_dir: PathText | None = None
    """Folder of the cache of tokenised corpora; None: the user's cache folder."""
    prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    """Batches prepared ahead of the step that needs them."""


class TrainConfig(Section):
    """Length of the run and size of its steps."""

    steps: CountOrZero | None = None
    """Optimizer steps; 0 only evaluates and exports. Set at most one of steps, tokens and epochs;
    without any of them a run has 100 steps."""
    tokens: Count | None = None
    """Tokens to train on, rounded up to whole steps."""
    epochs: Positive | None = None
    """Passes over the training split, rounded up to whole steps."""
    global_batch: Samples = 48
    """Samples per optimizer step over all ranks."""
    micro_batch: Samples | None = None
    """Samples per rank and pass; None: the largest divisor <= 8 of global_batch / data ranks."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Random seed of the initial weights, the data order and dropout."""
    label_smoothing: Probability = 0.0
    """Share of a target's probability that is distributed over the vocabulary (arXiv 1512.00567);
    not used in the held-out loss."""

    def num_steps(self, curriculum: Curriculum, seq_len: int) -> int | None:
        """Return the optimizer steps of the run; None under epochs, until the data is counted."""
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
    """Smaller batches and shorter sequences at the start; every sample is still read once."""

    batch_from: Samples | None = None
    """Samples of the first step; the batch rises to train.global_batch over ramp.batch_tokens."""
    batch_step: Samples | None = None
    """Samples that each rise adds; None: batch_from."""
    batch_tokens: Count | None = None
    """Tokens over which the batch rises, in equal parts."""
    length_from: Annotated[int, Field(ge=2)] | None = None
    """Length of the first sequences, tokens; it doubles to data.seq_len over ramp.length_tokens. A
    sample is split into several sequences, and a step keeps its number of tokens."""
    length_tokens: Count | None = None
    """Tokens over which the length rises, in equal parts."""
