"""Types shared by all sections of the run config, and the sections on batch and length."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import textwrap
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from harness.config.batch import Curriculum
from harness.files.paths import expanded_path

# At most one of these keys may be set.
LENGTHS = ("train.steps", "train.tokens", "train.epochs")
DEFAULT_STEPS = 100

MAX_COUNT = 2**53
"""Largest count that a float holds without rounding."""
MAX_SAMPLES = 2**31 - 1


def _whole(value: object) -> object:
    """Return 300e9, which is a float to TOML and JSON, as an integer."""
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


class TrainConfig(Section):
    """Length of the run and size of its steps."""

    steps: CountOrZero | None = None
    """Optimizer steps; 0 only evaluates and exports. Set at most one of steps, tokens and epochs;
    with none of them a run has 100 steps, or about 3 epochs with model.init_from."""
    tokens: Count | None = None
    """Tokens to train on, rounded up to whole steps."""
    epochs: Positive | None = None
    """Passes over the train split, rounded up to whole steps."""
    global_batch: Samples = 48
    """Windows per optimizer step, over all ranks: packed windows of data.seq_len tokens, or single
    examples (data.batching). The default is rounded up to a multiple that the ranks divide; with
    model.init_from it is lower if the data would give fewer than 100 steps."""
    micro_batch: Samples | None = None
    """Windows per rank and pass; None: the largest divisor <= 8 of global_batch / data ranks."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Random seed of initial weights, data order and dropout."""
    label_smoothing: Probability = 0.0
    """Share of a target's probability that is spread over the vocabulary (arXiv 1512.00567); not
    applied to the held-out loss."""
    carry_state: bool = False
    """For recurrent models and Mamba-2: carry the state, but no gradients, from one window of
    data.seq_len tokens to the next (truncated back-propagation through time). The rows of batches
    and evaluations are then contiguous streams of text, in data order."""

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
