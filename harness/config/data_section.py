"""The run config's section of the data, with its mixture: keys, types, defaults, meanings."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from harness.files.file_kinds import FORMATS
from harness.files.forms import problem_of_columns
from harness.files.kept_sample import TRAIN, kept_sample
from harness.files.splits import OF_A_SOURCE, TO_EVALUATE

DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE = 8192, 300
NEW, REHEARSED = "new", "rehearsed"
"""Names of the sources of a run that rehearses old data."""
_ANY_LENGTH: dict[str, Any] = {"min_tokens": None, "max_tokens": None}


def _named(value: object) -> object:
    """Return a single path as a table with an empty name, and each path as a table."""
    named = {"": value} if isinstance(value, str) else value
    if not isinstance(named, dict):
        return named
    return {name: {"path": of} if isinstance(of, str) else of for name, of in named.items()}


def _day(value: object) -> object:
    """Return a date, perhaps with a time, as text. Raises ValueError for text that is none."""
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError as error:
            raise ValueError(
                f"data.date is {value!r}, which is no date such as 2026-01-31: {error}"
            ) from error
    return value.isoformat() if isinstance(value, date) else value


class ReadAs(Section):
    """Data of its own, and how it is read."""

    path: PathText
    """Data as in data.path."""
    split: Text | None = None
    """Split of its folder, as in data.split; None: data.split; of a held-out set validation, else
    test."""
    format: Literal[tuple(FORMATS)] | None = None  # type: ignore[valid-type]
    """Format of its files; None: data.format."""
    columns: dict[str, Text] | None = None
    """Names of its columns; None: data.columns."""
    where: dict[str, str] | None = None
    """Values that its records have in some columns; None: data.where."""
    learn: Literal["assistant", "last", "all"] | None = None
    """Turns of its conversations to learn; None: data.learn."""
    min_tokens: Samples | None = None
    """Fewest tokens of a document that is read; None: data.min_tokens for a source of data.mix."""
    max_tokens: Samples | None = None
    """Most tokens of a document that is read; None: data.max_tokens for a source of data.mix."""

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
        """Return the path where there is nothing else, as earlier versions wrote it."""
        values = {key: value for key, value in whole(self).items() if value is not None}
        return self.path if [*values] == ["path"] else values


class MixSource(ReadAs):
    """A source of data.mix."""

    name: Text | None = None
    """Name in metrics and in the plan; None: the file's or folder's."""
    share: PositiveOrZero | None = None
    """Share of the mixture, relative to the other sources' (data.mix_by)."""
    then: PositiveOrZero | None = None
    """Share from data.mix_until on."""
    epochs: Annotated[float, Field(gt=0, le=MAX_SAMPLES)] | None = None
    """Most passes over the source; its share then goes to the other sources."""

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
    """Text, JSON, CSV, Parquet, a folder of them or of datasets' save_to_disk, or a .bin/.idx pair;
    None: Python's own standard library."""
    split: Text | None = None
    """Split of a folder to read: one of its data card or of its file names, SUBSET/SPLIT where a
    card has subsets, or all for the whole folder; None: train, and the others evaluate."""
    mix: list[MixSource] = Field(default_factory=list)
    """Several sources instead of data.path, each with path, and share, then, epochs, name, format,
    columns, where, learn, min_tokens, max_tokens as needed: data.mix=[{path="a", share=0.7},
    {path="b", share=0.3, epochs=2}]."""
    mix_by: Literal["samples", "tokens"] = "samples"
    """Unit of the shares; tokens: padding does not count."""
    mix_temperature: Annotated[float, Field(ge=1)] | None = None
    """Shares are the sources' sizes to the power of 1 / this, where none has a share; None: 1."""
    mix_until: Annotated[float, Field(gt=0, le=MAX_SAMPLES)] | None = None
    """Optimizer steps, or below 1 the fraction of the run, after which the shares `then` hold."""
    eval_path: Annotated[dict[str, EvalSet], BeforeValidator(_named)] = Field(default_factory=dict)
    """Held-out set, which replaces the split by data.held_out; or several by name, {chat="a.jsonl",
    code="b.jsonl"}: eval_loss/NAME is the loss of each, eval_loss that of the first. A table has
    path, and split, format, columns, where, learn, min_tokens, max_tokens as needed."""
    format: Literal[tuple(FORMATS)] | None = None  # type: ignore[valid-type]
    """Format of the files, whatever their names; None: by file name."""
    columns: dict[str, Text] = Field(default_factory=dict)
    """Names of the columns to read, e.g. {text="content"} or {question="q", answer="a"}; empty: by
    their usual names. prompt and completion are joined as they are, questions become chats."""
    where: dict[str, str] = Field(default_factory=dict)
    """Values that a record must have in some columns to be read, as in {language="de"}."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Records that cannot be read: the run is refused with all of them; or they are left out, and
    counted by kind with the first of each."""
    bad_rows_limit: Annotated[float, Field(gt=0)] = 0.1
    """Most records that bad_rows=skip leaves out of a source: a share below 1, else a number."""
    min_tokens: Samples | None = None
    """Fewest tokens of a document that is trained on, with the one that ends it; None: any."""
    max_tokens: Samples | None = None
    """Most tokens of a document that is trained on, with the one that ends it; None: any."""
    balance: Text | None = None
    """Column of the records whose values become sources of equal share, as those of data.mix; each
    has its own loss/VALUE."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """Turns of a conversation to learn: the assistant's, its last one, or all tokens."""
    template: PathText | None = None
    """Chat template in place of the tokenizer's: a .jinja file, or a name as chatml; None: the
    tokenizer's own."""
    date: Annotated[str, BeforeValidator(_day)] | None = None
    """Date that a chat template writes which asks for it, as 2026-01-31 or 2026-01-31T09:30; None:
    that of the day (UTC) on which the run is first started, which it keeps. Its time is 00:00."""
    bos: Literal["auto", "off"] = "auto"
    """auto: if the tokenizer prepends a BOS token, every text document starts with it, once; off:
    none is added. A conversation begins as its template writes it."""
    tokenizer: PathText | None = None
    """Folder or hub id of a Hugging Face tokenizer; None: the corpus's own, or train one."""
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE, le=1_000_000)] = DEFAULT_VOCAB_SIZE
    """Most pieces of a tokenizer that is trained on the corpus (data.tokenizer=None)."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SAMPLES)] = 128
    """Length of a window, tokens: the row that a step reads several of (train.global_batch), into
    which examples, the rows of your data, are packed."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the documents kept for evaluation."""
    packing: Literal["whole", "stream"] | None = None
    """whole: a window holds whole documents, best-fit packed, and padding; stream: documents follow
    each other, cut at the end of every window; None: whole if prompts are masked, else stream."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    """Where windows hold whole documents (data.packing, data.batching), what happens to those
    longer than seq_len: cut at their end, left out, or the run is refused."""
    batching: Literal["packed", "padded", "length_grouped", "token_budget"] = "packed"
    """packed: windows of seq_len tokens, by data.packing. Otherwise a window is one document,
    padded to the longest of its micro-batch; padded: in random order; length_grouped: with others
    of similar length; token_budget: with as many as data.tokens_per_batch holds."""
    tokens_per_batch: Samples | None = None
    """Under batching=token_budget, most positions of a micro-batch, padding included: a multiple of
    seq_len, which sets train.micro_batch; None: micro_batch * seq_len."""
    pool_samples: Samples = 1024
    """Windows that batching sorts by length together; more leave less padding."""
    group_samples: Samples = 8
    """Windows of similar length that follow each other in a sorted pool: micro_batch, or that times
    the data ranks, so that all of them compute equally long."""
    rehearse: PathText | None = None
    """Old data to mix in against forgetting: a run folder, of which the sample that it kept is
    read, or a path as in data.path; the loss of its held-out part is old_eval_loss."""
    rehearse_share: Probability = 0.1
    """Share of the windows that come from data.rehearse; 0 only measures old_eval_loss."""
    reservoir: Annotated[int, Field(ge=0, le=1 << 16)] = 1024
    """Windows to keep in the run folder of all that the run reads, at most 8 million tokens of
    them, for data.rehearse of later runs; 0 keeps none."""
    document_mask: bool | None = None
    """Tokens attend only within their document; None: only for prompt/completion data."""
    cache_dir: PathText | None = None
    """Folder of the cache of tokenised corpora; None: the user's cache folder."""
    prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    """Batches prepared ahead of the step that needs them."""

    @property
    def most_bad_rows(self) -> float | None:
        """Most bad records that are left out, as in bad_rows_limit; None: none is."""
        return self.bad_rows_limit if self.bad_rows == "skip" else None

    def sources(self) -> dict[str, DataConfig]:
        """Return the data section of each source of `mix` by name; without, this one by "". That
        of old data is last. Raises ConfigError if data.rehearse is a run without a sample.
        """
        source = self if self.split else self.model_copy(update={"split": OF_A_SOURCE})
        own = {of.label: source._only(of.path, of) for of in self.mix}
        old = self.rehearsed() if self.rehearse_share else None
        if old is None:
            return own or {"": self}
        return {**(own or {NEW: self.model_copy(update={"rehearse": None})}), REHEARSED: old}

    def rehearsed(self, side: str = TRAIN) -> DataConfig | None:
        """Return the data section of data.rehearse, of a run's sample that of one side; None
        without. Raises ConfigError if it is a run without a sample.
        """
        if self.rehearse is None:
            return None
        kept = kept_sample(self.rehearse)
        if kept is None:
            return self._only(self.rehearse).model_copy(update=_ANY_LENGTH | {"split": None})
        as_kept: dict[str, Any] = {"format": None, "columns": {}, "where": {}, "split": None}
        return self._only(str(kept / side)).model_copy(update=as_kept | _ANY_LENGTH)

    def eval_sets(self) -> dict[str, DataConfig]:
        """Return the data section of each held-out set of `eval_path` by name."""
        as_set = _ANY_LENGTH | {"split": TO_EVALUATE}
        sets = {name: self.model_copy(update=as_set) for name in self.eval_path}
        return {name: sets[name]._only(of.path, of) for name, of in self.eval_path.items()}

    def _only(self, path: str, source: ReadAs | None = None) -> DataConfig:
        """Return the section of one path; a source may say how it is read."""
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

    @field_validator("columns")
    @classmethod
    def _make_a_document(cls, columns: dict[str, str]) -> dict[str, str]:
        if problem := problem_of_columns(columns):
            raise ValueError(f"data.columns {problem}")
        return columns


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
            below = data.tokens_per_batch // data.seq_len * data.seq_len
            legal = " or ".join(str(n) for n in (below, below + data.seq_len) if n)
            yield (
                f"data.tokens_per_batch is {data.tokens_per_batch}, no multiple of data.seq_len = "
                f"{data.seq_len}, the longest document: set it to {legal}"
            )
    if data.pool_samples % data.group_samples:
        yield (
            f"data.pool_samples is {data.pool_samples}, no multiple of data.group_samples = "
            f"{data.group_samples}"
        )
    if data.packing == "stream" and data.too_long != "cut":
        yield (
            f"data.too_long is {data.too_long!r}, but data.packing=stream cuts documents of any "
            "length: remove one of them"
        )


def _length_problems(data: DataConfig) -> Iterator[str]:
    entries: list[tuple[str, DataConfig | ReadAs]] = [
        ("data", data),
        *((f"data.mix {of.label}", of) for of in data.mix),
        *((f"data.eval_path {name}".rstrip(), of) for name, of in data.eval_path.items()),
    ]
    for key, of in entries:
        in_mix = data if isinstance(of, MixSource) else of
        least, most = of.min_tokens or in_mix.min_tokens, of.max_tokens or in_mix.max_tokens
        if least is not None and most is not None and least > most:
            yield f"{key}: min_tokens is {least}, above max_tokens = {most}: no document has both"


def _row_problems(data: DataConfig) -> Iterator[str]:
    limit = data.bad_rows_limit
    if data.bad_rows != "skip" and limit != DataConfig.model_fields["bad_rows_limit"].default:
        yield "data.bad_rows_limit is for data.bad_rows=skip: set data.bad_rows=skip, or remove it"
    if limit > 1 and limit % 1:
        yield f"data.bad_rows_limit is {limit:g}: above 1 it is a whole number of records"


def _eval_problems(data: DataConfig) -> Iterator[str]:
    if data.eval_path and data.held_out != DataConfig.model_fields["held_out"].default:
        yield (
            f"data.held_out is {data.held_out:g}, but data.eval_path is the held-out set: remove "
            "one of them"
        )
    for name in data.eval_path:
        if name and not re.fullmatch(NAME_PATTERN, name):
            yield f"data.eval_path: {name!r} is no name (letters, digits, _, . and -)"


def _rehearsal_problems(data: DataConfig) -> Iterator[str]:
    default = DataConfig.model_fields["rehearse_share"].default
    if data.rehearse is None and data.rehearse_share != default:
        yield "data.rehearse_share without data.rehearse: name the run or the data to rehearse"
    if data.rehearse is not None and REHEARSED in (source.label for source in data.mix):
        yield f"data.mix: {REHEARSED!r} is the name of the data of data.rehearse: set another name"


def _mix_problems(data: DataConfig) -> Iterator[str]:
    """Yield the problems of data.mix and of the keys that belong to it."""
    if data.balance is not None and data.mix:
        yield "data.balance and data.mix exclude each other: use where for each source of data.mix"
    elif data.balance is not None and data.path is None:
        yield "data.balance without data.path: Python's own library has no columns"
    if not data.mix:
        of_mix = ("mix_temperature", "mix_until", *(() if data.balance else ("mix_by",)))
        alone = [
            f"data.{key}"
            for key in of_mix
            if getattr(data, key) != DataConfig.model_fields[key].default
        ]
        if alone:
            yield f"{', '.join(alone)} without data.mix: name its sources"
        return
    if data.path is not None:
        yield "data.path and data.mix exclude each other: a source has its own path"
    labels = [source.label for source in data.mix]
    for label in dict.fromkeys(labels):
        if labels.count(label) > 1:
            yield f"{labels.count(label)} sources of data.mix are named {label!r}: set their name"
        elif not re.fullmatch(NAME_PATTERN, label):
            yield f"data.mix: {label!r} is no name (letters, digits, _, . and -): set name"
    for key in ("share", "then"):
        values = [getattr(source, key) for source in data.mix]
        if None in values and any(value is not None for value in values):
            without = [label for label, value in zip(labels, values, strict=True) if value is None]
            yield f"data.mix: {', '.join(without)} without {key}: give all sources one, or none"
        elif values[0] is not None and not sum(values):
            yield f"data.mix: {key} is 0 for every source"
    shares, then = data.mix[0].share, data.mix[0].then
    if shares is not None and data.mix_temperature is not None:
        yield "data.mix_temperature makes shares of sizes: remove it, or the share of each source"
    if data.mix_until is not None and data.mix_until > 1 and data.mix_until % 1:
        yield f"data.mix_until is {data.mix_until:g}: above 1 it is a whole number of steps"
    if (then is None) != (data.mix_until is None):
        yield "data.mix_until and the share `then` of each source of data.mix need each other"
