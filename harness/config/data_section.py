"""The run config's data section and its sources: keys, types, defaults, meanings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from harness.config.assignments import multiples_near
from harness.config.sections import (
    MAX_SAMPLES,
    NAME_PATTERN,
    PathText,
    PositiveOrZero,
    Probability,
    Samples,
    Section,
    Text,
)
from harness.files.chat import problem_of_values
from harness.files.file_kinds import FORMATS
from harness.files.forms import problem_of_columns
from harness.files.kept_sample import TRAIN, kept_sample
from harness.files.splits import OF_A_SOURCE, TO_EVALUATE

DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE = 8192, 300
NEW, REHEARSED = "new", "rehearsed"
"""Names of the two sources in a run that rehearses old data."""
_ANY_LENGTH: dict[str, Any] = {"min_tokens": None, "max_tokens": None}


def _named(value: object) -> object:
    """Return paths as tables by name; a single path gets an empty name."""
    named = {"": value} if isinstance(value, str) else value
    if not isinstance(named, dict):
        return named
    return {
        name: {"path": value} if isinstance(value, str) else value for name, value in named.items()
    }


def _day(value: object) -> object:
    """Return a date, with or without time, as text. Raises ValueError for other text."""
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError as error:
            raise ValueError(
                f"data.date is {value!r}, which is not a date such as 2026-01-31: {error}"
            ) from error
    return value.isoformat() if isinstance(value, date) else value


def _as_text(value: object) -> object:
    """Return a number or a boolean as text, as forms.value_of does with a record's value."""
    return str(value) if isinstance(value, int | float) else value


Where = dict[str, Annotated[str, BeforeValidator(_as_text)]]


class ReadAs(Section):
    """Data with its own path and reading settings."""

    path: PathText
    """Data, as in data.path."""
    split: Text | None = None
    """Split of its folder, as in data.split; None: data.split or, for a held-out set, validation
    (test if there is no validation)."""
    format: Literal[tuple(FORMATS)] | None = None  # type: ignore[valid-type]
    """Format of its files; None: data.format."""
    columns: dict[str, Text] | None = None
    """Column names; None: data.columns."""
    where: Where | None = None
    """Values that records must have in some columns; None: data.where."""
    learn: Literal["assistant", "last", "all"] | None = None
    """Turns of conversations to train on; None: data.learn."""
    min_tokens: Samples | None = None
    """Minimum tokens of a document; None: data.min_tokens, or no limit for a held-out set."""
    max_tokens: Samples | None = None
    """Maximum tokens of a document; None: data.max_tokens, or no limit for a held-out set."""

    @field_validator("columns")
    @classmethod
    def _make_a_document(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        if problem := problem_of_columns(columns or {}):
            raise ValueError(problem)
        return columns


class EvalSet(ReadAs):
    """A held-out set of data.eval_path."""

    @model_serializer(mode="wrap")
    def _as_written(self, whole: SerializerFunctionWrapHandler) -> Any:
        """Return just the path if nothing else is set."""
        values = {key: value for key, value in whole(self).items() if value is not None}
        return self.path if [*values] == ["path"] else values


class MixSource(ReadAs):
    """A source of data.mix."""

    name: Text | None = None
    """Name in metrics and in the plan; None: that of the file or folder."""
    share: PositiveOrZero | None = None
    """Share of the mixture, relative to the other sources' shares (data.mix_by)."""
    then: PositiveOrZero | None = None
    """Share after data.mix_until."""
    epochs: Annotated[float, Field(gt=0, le=MAX_SAMPLES)] | None = None
    """Maximum passes over the source; its share then goes to the other sources."""

    @property
    def label(self) -> str:
        """The source's name."""
        if self.name is not None:
            return self.name
        bounds = (("min", self.min_tokens), ("max", self.max_tokens))
        of_length = [f"-{name}-{bound}" for name, bound in bounds if bound is not None]
        return "".join([PurePath(self.path).stem, *of_length])


class DataConfig(Section):
    """Training data."""

    path: PathText | None = None
    """Text, JSON, CSV or Parquet, a folder of them or of datasets' save_to_disk, or a .bin/.idx
    pair; None: Python's standard library."""
    split: Text | None = None
    """Split of a folder to read, from its data card or file names (SUBSET/SPLIT if the card has
    subsets), or all for the whole folder; None: train, with the others for evaluation."""
    mix: list[MixSource] = Field(default_factory=list)
    """Several sources instead of data.path. Each has path and, as needed, share, then, epochs,
    name, format, columns, where, learn, min_tokens, max_tokens: data.mix=[{path="a", share=0.7},
    {path="b", share=0.3, epochs=2}]."""
    mix_by: Literal["samples", "tokens"] = "samples"
    """Unit of the shares; tokens exclude padding."""
    mix_temperature: Annotated[float, Field(ge=1)] | None = None
    """If no source has a share: shares are proportional to the sources' sizes to the power of
    1 / mix_temperature; None: 1."""
    mix_until: Annotated[float, Field(gt=0, le=MAX_SAMPLES)] | None = None
    """Number of optimizer steps after which the `then` shares apply; below 1, a fraction of the
    run."""
    eval_path: Annotated[dict[str, EvalSet], BeforeValidator(_named)] = Field(default_factory=dict)
    """Held-out set, instead of the data.held_out fraction; or several by name, {chat="a.jsonl",
    code="b.jsonl"}: eval_loss/NAME is the loss of each, eval_loss that of the first. A table has
    path and, as needed, split, format, columns, where, learn, min_tokens, max_tokens."""
    format: Literal[tuple(FORMATS)] | None = None  # type: ignore[valid-type]
    """Format of all files; None: by file name."""
    columns: dict[str, Text] = Field(default_factory=dict)
    """Columns to read, e.g. {text="content"} or {question="q", answer="a"}; empty: their usual
    names. prompt and completion are concatenated unchanged; questions and answers become chats."""
    where: Where = Field(default_factory=dict)
    """Values that a record must have in some columns to be read, e.g. {language="de"}."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Unreadable records: refuse stops and lists them all; skip leaves them out and reports their
    number by kind, with the first of each."""
    bad_rows_limit: Annotated[float, Field(gt=0)] = 0.1
    """Maximum number of records per source that bad_rows=skip leaves out; below 1, a share of its
    records."""
    min_tokens: Samples | None = None
    """Minimum tokens of a document to train on, including the separator; None: no limit."""
    max_tokens: Samples | None = None
    """Maximum tokens of a document to train on, including the separator; None: no limit."""
    balance: Text | None = None
    """Column whose values become sources with equal shares, as in data.mix; loss/VALUE is the loss
    of each."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """What to train on in a conversation. assistant: the assistant's turns; last: the last of
    them; all: all tokens."""
    template: PathText | None = None
    """Chat template to use instead of the tokenizer's: a .jinja file or a built-in name such as
    chatml; None: the tokenizer's."""
    template_values: dict[str, Any] = Field(default_factory=dict)
    """Values for other variables of the chat template, e.g. {enable_thinking=false}; a row's column
    chat_template_kwargs comes first."""
    date: Annotated[str, BeforeValidator(_day)] | None = None
    """Date for chat templates that write one, e.g. 2026-01-31 or 2026-01-31T09:30; None: the UTC
    date on which the run first starts, at 00:00, kept when it resumes."""
    bos: Literal["auto", "off"] = "auto"
    """auto: if the tokenizer prepends a BOS token, every text document starts with one; off: none
    is added. Conversations start as their template writes them."""
    tokenizer: PathText | None = None
    """Hugging Face tokenizer, a folder or hub id; None: that of the initial weights, or without
    them one trained on the corpus."""
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE, le=1_000_000)] = DEFAULT_VOCAB_SIZE
    """Maximum vocabulary of a tokenizer trained on the corpus (data.tokenizer=None)."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SAMPLES)] = 128
    """Tokens per window. Examples (rows of your data) are packed into windows; a step reads several
    windows (train.global_batch)."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the documents held out for evaluation."""
    packing: Literal["whole", "stream"] | None = None
    """whole: best-fit packing of whole documents, with padding; stream: concatenated documents, cut
    at the end of each window; None: whole if prompts are masked, otherwise stream."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    """Handling of documents longer than seq_len if windows hold whole documents (data.packing,
    data.batching): cut them at the end, drop them, or refuse to run."""
    batching: Literal["packed", "padded", "length_grouped", "token_budget"] = "packed"
    """packed: windows of seq_len tokens (data.packing). Otherwise a window is one document, padded
    to the longest in its micro-batch; a micro-batch holds random documents (padded), documents of
    similar length (length_grouped), or as many as fit in data.tokens_per_batch (token_budget)."""
    tokens_per_batch: Samples | None = None
    """For batching=token_budget: maximum positions per micro-batch, including padding; a multiple
    of seq_len that sets train.micro_batch; None: micro_batch * seq_len."""
    pool_samples: Samples = 1024
    """Number of windows to sort by length together; larger pools need less padding."""
    group_samples: Samples = 8
    """Number of windows of similar length to keep together in a sorted pool: micro_batch, or
    micro_batch times the number of data ranks to give all ranks equal work."""
    rehearse: PathText | None = None
    """Old data to mix in against forgetting: a run folder, whose kept sample is read, or a path as
    in data.path. The loss on its held-out part is old_eval_loss."""
    rehearse_share: Probability = 0.1
    """Share of windows from data.rehearse; 0 only measures old_eval_loss."""
    reservoir: Annotated[int, Field(ge=0, le=1 << 16)] = 1024
    """Windows of training data, at most 8 million tokens, to keep in the run folder for
    data.rehearse in later runs; 0 keeps none."""
    document_mask: bool | None = None
    """Confine attention to documents; None: only if prompts are masked."""
    cache_dir: PathText | None = None
    """Cache folder for tokenized corpora; None: the user's cache folder."""
    prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    """Number of batches to prepare ahead."""

    @property
    def most_bad_rows(self) -> float | None:
        """Maximum number or share of bad records to skip; None: none may be skipped."""
        return self.bad_rows_limit if self.bad_rows == "skip" else None

    @property
    def evaluated_sets(self) -> int:
        """Number of sample sets that an evaluation reads: the held-out sets and the old data's."""
        return max(1, len(self.eval_path)) + (self.rehearse is not None)

    def masks_documents(self, is_masked: bool) -> bool:
        """Return data.document_mask; its default depends on whether prompts are masked."""
        if self.document_mask is not None:
            return self.document_mask
        return is_masked and self.batching == "packed"  # others have one document per row

    def too_long_text(
        self, number: int, documents: int, roughly: str = "", of_pairs: bool = False
    ) -> str:
        """Return a sentence about the documents, or pairs, that are longer than a window."""
        done, other = {
            "cut": ("are cut at the end", " to drop or refuse"),
            "drop": ("are dropped", " to cut or refuse"),
            "refuse": ("are refused", " to cut or drop"),
        }[self.too_long]
        share, kind = number / max(documents, 1), "documents"
        if of_pairs:  # which are not cut
            kind, other = "pairs", {"drop": " to refuse", "refuse": " to drop"}[self.too_long]
        return (
            f"{roughly}{number:,} of {documents:,} {kind} ({share:.1%}) are longer than "
            f"data.seq_len = {self.seq_len:,} tokens and {done}: raise data.seq_len, or set "
            f"data.too_long{other}"
        )

    def sources(self) -> dict[str, DataConfig]:
        """Return the data section of each source of `mix` by name, then that of the old data if it
        is mixed in. Without `mix`, this section is the only other source, named NEW, or "" if there
        is no old data. Raises ConfigError if data.rehearse is a run that kept no sample.
        """
        source = self if self.split else self.model_copy(update={"split": OF_A_SOURCE})
        own = {part.label: source._only(part.path, part) for part in self.mix}
        old = self.rehearsed() if self.rehearse_share else None
        if old is None:
            return own or {"": self}
        return {**(own or {NEW: self.model_copy(update={"rehearse": None})}), REHEARSED: old}

    def rehearsed(self, side: str = TRAIN) -> DataConfig | None:
        """Return the data section of the path in data.rehearse or, if it is a run, of one `side` of
        its kept sample; None without data.rehearse. Raises ConfigError if the run kept no sample.
        """
        if self.rehearse is None:
            return None
        kept = kept_sample(self.rehearse)
        if kept is None:
            return self._only(self.rehearse).model_copy(update=_ANY_LENGTH | {"split": None})
        as_kept: dict[str, Any] = {"format": None, "columns": {}, "where": {}, "split": None}
        return self._only(str(kept / side)).model_copy(update=as_kept | _ANY_LENGTH)

    def eval_sets(self) -> dict[str, DataConfig]:
        """Return the data section of each held-out set in `eval_path` by name."""
        as_set = _ANY_LENGTH | {"split": TO_EVALUATE}
        sets = {name: self.model_copy(update=as_set) for name in self.eval_path}
        return {
            name: sets[name]._only(source.path, source) for name, source in self.eval_path.items()
        }

    def _only(self, path: str, source: ReadAs | None = None) -> DataConfig:
        """Return the section for a single path; `source` may override how it is read."""
        own = {key: getattr(source, key, None) for key in ReadAs.model_fields if key != "path"}
        changes: dict[str, Any] = {"path": path, "mix": [], "eval_path": {}, "rehearse": None}
        changes |= {key: value for key, value in own.items() if value is not None}
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _settings_fit_together(self) -> DataConfig:
        problems = [*_packing_problems(self), *_mix_problems(self), *_eval_problems(self)]
        problems += [*_rehearsal_problems(self), *_length_problems(self), *_row_problems(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @field_validator("template_values")
    @classmethod
    def _are_for_templates(cls, values: dict[str, Any]) -> dict[str, Any]:
        if problem := problem_of_values(values):
            raise ValueError(f"data.template_values {problem}")
        return values

    @field_validator("columns")
    @classmethod
    def _make_a_document(cls, columns: dict[str, str]) -> dict[str, str]:
        if problem := problem_of_columns(columns):
            raise ValueError(f"data.columns {problem}")
        return columns


def _differs(data: DataConfig, key: str) -> bool:
    """Return True if a key differs from its default."""
    return bool(getattr(data, key) != DataConfig.model_fields[key].default)


def _packing_problems(data: DataConfig) -> Iterator[str]:
    if data.batching != "packed" and data.packing is not None:
        yield (
            f"data.packing={data.packing} is for data.batching=packed, not {data.batching}, where "
            "a sample is one document: remove one of them"
        )
    if data.tokens_per_batch is not None:
        if data.batching != "token_budget":
            yield (
                "data.tokens_per_batch is for data.batching=token_budget: set data.batching="
                "token_budget, or remove it"
            )
        if data.tokens_per_batch % data.seq_len:
            legal = multiples_near(data.tokens_per_batch, data.seq_len)
            yield (
                f"data.tokens_per_batch is {data.tokens_per_batch}, which is not a multiple of "
                f"data.seq_len = {data.seq_len}, the longest document: set it to {legal}"
            )
    if data.pool_samples % data.group_samples:
        yield (
            f"data.pool_samples is {data.pool_samples}, which is not a multiple of "
            f"data.group_samples = {data.group_samples}"
        )
    if data.packing == "stream" and data.too_long != "cut":
        yield (
            f"data.too_long is {data.too_long!r}, but data.packing=stream cuts documents of any "
            "length: remove one of them"
        )


def _length_problems(data: DataConfig) -> Iterator[str]:
    entries: list[tuple[str, DataConfig | ReadAs]] = [
        ("data", data),
        *((f"data.mix {source.label}", source) for source in data.mix),
        *((f"data.eval_path {name}".rstrip(), source) for name, source in data.eval_path.items()),
    ]
    for key, source in entries:
        in_mix = data if isinstance(source, MixSource) else source
        least, most = source.min_tokens or in_mix.min_tokens, source.max_tokens or in_mix.max_tokens
        if least is not None and most is not None and least > most:
            yield f"{key}: min_tokens is {least}, above max_tokens = {most}: no document has both"


def _row_problems(data: DataConfig) -> Iterator[str]:
    limit = data.bad_rows_limit
    if data.bad_rows != "skip" and _differs(data, "bad_rows_limit"):
        yield "data.bad_rows_limit is for data.bad_rows=skip: set data.bad_rows=skip, or remove it"
    if limit > 1 and limit % 1:
        yield f"data.bad_rows_limit is {limit:g}: above 1 it must be a whole number of records"


def _eval_problems(data: DataConfig) -> Iterator[str]:
    if data.eval_path and _differs(data, "held_out"):
        yield (
            f"data.held_out is {data.held_out:g}, but data.eval_path is the held-out set: remove "
            "one of them"
        )
    for name in data.eval_path:
        if name and not re.fullmatch(NAME_PATTERN, name):
            yield f"data.eval_path: {name!r} is not a valid name (letters, digits, _, . and -)"


def _rehearsal_problems(data: DataConfig) -> Iterator[str]:
    if data.rehearse is None and _differs(data, "rehearse_share"):
        yield "data.rehearse_share needs data.rehearse: name the run or the data to rehearse"
    if data.rehearse is not None and REHEARSED in (source.label for source in data.mix):
        yield f"data.mix: {REHEARSED!r} is reserved for the data of data.rehearse: set another name"


def _mix_problems(data: DataConfig) -> Iterator[str]:
    """Yield the problems of data.mix and of the keys related to it."""
    if data.balance is not None and data.mix:
        yield "data.balance and data.mix exclude each other: use where for each source of data.mix"
    elif data.balance is not None and data.path is None:
        yield "data.balance needs data.path: Python's own library has no columns"
    if not data.mix:
        of_mix = ("mix_temperature", "mix_until", *(() if data.balance else ("mix_by",)))
        if alone := [f"data.{key}" for key in of_mix if _differs(data, key)]:
            yield f"{', '.join(alone)} set without data.mix: name its sources"
        return
    if data.path is not None:
        yield "data.path and data.mix exclude each other: a source has its own path"
    labels = [source.label for source in data.mix]
    for label in dict.fromkeys(labels):
        if labels.count(label) > 1:
            yield f"{labels.count(label)} sources of data.mix are named {label!r}: set their name"
        elif not re.fullmatch(NAME_PATTERN, label):
            yield f"data.mix: {label!r} is not a valid name (letters, digits, _, . and -): set name"
    for key in ("share", "then"):
        values = [getattr(source, key) for source in data.mix]
        if None in values and any(value is not None for value in values):
            without = [label for label, value in zip(labels, values, strict=True) if value is None]
            yield f"data.mix: {', '.join(without)} without {key}: give all sources one, or none"
        elif values[0] is not None and not sum(values):
            yield f"data.mix: {key} is 0 for every source"
    shares, then = data.mix[0].share, data.mix[0].then
    if shares is not None and data.mix_temperature is not None:
        why = "data.mix_temperature derives shares from sizes"
        yield f"{why}: remove it, or the share of each source"
    if data.mix_until is not None and data.mix_until > 1 and data.mix_until % 1:
        yield f"data.mix_until is {data.mix_until:g}: above 1 it must be a whole number of steps"
    if (then is None) != (data.mix_until is None):
        yield "data.mix_until and the share `then` of each source of data.mix must be set together"


@dataclass(frozen=True)
class TokenBounds:
    """Minimum and maximum length of the documents that are read, in tokens with the separator."""

    least: int | None = None
    most: int | None = None

    def text(self) -> str:
        """Return the bounds as text; "" if there are none."""
        bounds = {"data.min_tokens": self.least, "data.max_tokens": self.most}
        return ", ".join(f"{key}={value}" for key, value in bounds.items() if value is not None)

    def left_out(self, shorter: int, longer: int) -> str:
        """Return counts of documents that are not read, as text; "" if all are read."""
        parts = [f"{shorter:,} shorter than {self.least:,} tokens"] if shorter else []
        parts += [f"{longer:,} longer than {self.most:,} tokens"] if longer else []
        return " and ".join(parts)


ANY_LENGTH = TokenBounds()
