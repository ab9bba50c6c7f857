"""DataSpec: the input of build_data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.config.data_section import REHEARSED, DataConfig, TokenBounds
from harness.config.run_config import RunConfig, run_and_step
from harness.errors import ConfigError
from harness.files.corpus import Corpus, ReadLimit, find_corpus
from harness.files.forms import example, read
from harness.files.kept_sample import HELD_OUT, kept_facts, kept_sample, side_of_sample
from harness.runfolder import RunFolder

PAD_TO = 8
"""Padded micro-batches have lengths that are multiples of this, for the sake of tensor cores."""


@dataclass(frozen=True)
class DataSpec:
    """Input of build_data."""

    config: DataConfig = field(default_factory=DataConfig)
    seed: int = 0
    """Seed of the sample order of the train split."""
    model_vocab_size: int | None = None
    """Rows of the model's embedding; None: the tokenizer's vocabulary size."""
    trust_remote_code: bool = False
    until_sample: int | None = None
    """Sample from which the `then` shares of data.mix apply."""
    splits: bool = True
    """False: no document is held out."""
    stride: int | None = None
    """Tokens from one window to the next if a run's kept samples are read as it read them; None:
    data.seq_len."""
    pad_to: int = PAD_TO
    """Padded micro-batches have lengths that are multiples of this."""
    rows: int | None = None
    """Number of contiguous streams to read the train split as; None: samples in random order."""
    eval_seq_len: int | None = None
    """Sample length of Data.long_held_out; None: no such samples."""
    eval_samples: int | None = None
    """Held-out samples per evaluation, for which contiguous streams are cut; None: all."""
    limit: ReadLimit | None = None
    """Where reading stops, for a dry run; None: at the end."""
    preferences: str = ""
    """train.objective if it compares pairs; "" for next-token prediction."""
    adds_rows: bool = False
    """True if the model gets extra rows for tokenizer ids beyond its vocabulary."""

    @classmethod
    def of_run(
        cls, run: RunConfig, model_config: Mapping[str, Any], *, trust_remote_code: bool = False
    ) -> DataSpec:
        """Return the spec of a run. Initial weights bring their tokenizer."""
        tokenizer = run.data.tokenizer or tokenizer_of(run.model.init_from)
        if tokenizer is None and run.data.rehearse and kept_sample(run.data.rehearse):
            tokenizer = tokenizer_of(run.data.rehearse)
        config = run.data.model_copy(update={"tokenizer": tokenizer})
        vocab_size = model_config.get("vocab_size")
        rows = run.train.global_batch if run.train.carry_state else None
        return cls(
            config,
            run.train.seed,
            vocab_size,
            trust_remote_code,
            _until_sample(run),
            adds_rows=run.model.init_from is not None and "vocab_size" not in run.model.overrides,
            rows=rows,
            preferences=run.train.preferences,
            eval_seq_len=run.eval.seq_len,
            eval_samples=run.eval.samples,
        )

    def sources(self) -> dict[str, DataSpec]:
        """Return the spec of each source of data.mix by name; without data.mix, this spec as "", or
        as NEW if old data is mixed in, which comes last. Raises ConfigError if data.rehearse is a
        run that kept no sample.
        """
        splits, sources = not self.config.eval_path, self.config.sources()
        specs = {
            name: replace(self, config=section, splits=splits) for name, section in sources.items()
        }
        if self.rehearses:
            specs[REHEARSED] = self._old(specs[REHEARSED].config)
        return specs

    @property
    def bounds(self) -> TokenBounds:
        """Length limits of the documents that are read."""
        return TokenBounds(self.config.min_tokens, self.config.max_tokens)

    @property
    def rehearses(self) -> bool:
        """True if old data is mixed in."""
        return self.config.rehearse is not None and self.config.rehearse_share > 0

    def old_set(self) -> DataSpec | None:
        """Return the spec of the held-out part of data.rehearse; None without one."""
        config = self.config.rehearsed(HELD_OUT)
        if config is None:
            return None
        return self._old(config)

    def _old(self, config: DataConfig) -> DataSpec:
        """Return the spec of the data of data.rehearse."""
        assert self.config.rehearse is not None
        if kept_sample(self.config.rehearse) is None:
            return replace(self, config=config, splits=True)
        return self._kept(config, Path(str(config.path)), "data.rehearse")

    def _kept(self, config: DataConfig, prefix: Path, key: str) -> DataSpec:
        """Return the spec of one side of a kept sample. Its samples are read as the run read them
        if they have the same length; otherwise as whole documents, so that none continues into
        another.
        """
        tokens = kept_facts(prefix.parent, key).get(f"{prefix.name}_tokens")
        as_read = tokens == config.seq_len + 1 and config.batching == "packed"
        packing = {"packing": "stream"} if as_read else {"packing": "whole", "too_long": "cut"}
        config = config.model_copy(update=packing)
        stride = config.seq_len + 1 if as_read else None
        return replace(self, config=config, splits=False, stride=stride)

    def require_tokenizer(self, tokenizer: str) -> None:
        """Raise ConfigError if a kept sample was read with a tokenizer of a different hash."""
        old, sets = self.config.rehearsed(HELD_OUT), self.config.eval_sets().values()
        named = [("data.eval_path", section.path, section.path, "remove it") for section in sets]
        if old is not None:
            named.append(
                ("data.rehearse", self.config.rehearse, old.path, "name the path of its data")
            )
        for key, value, path, other in named:
            prefix = side_of_sample(str(path))
            if prefix is None or kept_facts(prefix.parent, key).get("tokenizer") == tokenizer:
                continue
            raise ConfigError(
                f"{key} is {value!r}, whose sample was read with another tokenizer: set "
                f"data.tokenizer={prefix.parent.parent}/tokenizer, or {other}"
            )

    def eval_sets(self) -> dict[str, DataSpec]:
        """Return the spec of each held-out set of data.eval_path by name."""
        sets = dict[str, DataSpec]()
        for name, config in self.config.eval_sets().items():
            prefix = side_of_sample(str(config.path))
            if prefix is None:
                sets[name] = replace(self, config=config, splits=False)
            else:
                sets[name] = self._kept(config, prefix, "data.eval_path")
        return sets


def tokenizer_of(init_from: str | None) -> str | None:
    """Return the tokenizer of initial weights, which a run folder keeps in a separate folder."""
    if init_from is None:
        return None
    folder = RunFolder(run_and_step(init_from)[0]).tokenizer_dir
    return str(folder) if folder.is_dir() else init_from


def unused_template(corpus: Corpus, data: DataConfig) -> dict[str, str]:
    """Return a warning by kind of event if text pairs do not use data.template."""
    if data.template is None or corpus.kind != "text" or corpus.holds_chats:
        return {}
    names = {"question": "prompt", "answer": "completion"}
    columns = {key: corpus.columns.get(name, name) for key, name in names.items()}
    first = next(corpus.parts(corpus.bad_lines()), None)
    try:
        read(first and first.record, columns)
    except ValueError:
        return {}
    said = f"data.template is {data.template}, but a prompt and its completion are read as text"
    return {"unused_template": f"{said}: {example(columns)} reads them as conversations"}


def _until_sample(run: RunConfig) -> int | None:
    until = run.data.mix_until
    if until is None:
        return None
    if until < 1:
        steps = run.train.num_steps(run.curriculum, run.data.seq_len)
        assert steps is not None, "the plan refuses a fraction of epochs"
        until = round(until * steps)
    return run.curriculum.samples_after(int(until))


def corpus_of(spec: DataSpec) -> Corpus:
    """Return the corpus of one source. Raises ConfigError if it cannot be read."""
    try:
        config = spec.config
        corpus = find_corpus(
            config.path,
            config.format,
            config.columns,
            config.where,
            config.split,
            config.most_bad_rows,
            spec.limit,
            spec.preferences,
        )
        corpus.identity()
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    return corpus


def corpora_of(spec: DataSpec) -> list[Corpus]:
    """Return the corpora of the sources. Raises ConfigError, also for the held-out sets."""
    parts, corpora, problems = spec.sources(), [], []
    for part in [*parts.values(), *spec.eval_sets().values()]:
        try:
            corpora.append(corpus_of(part))
        except ConfigError as error:
            problems += error.problems
    if not problems:
        named = zip(parts, corpora, strict=False)  # without the held-out sets
        problems += _overlaps({name: corpus for name, corpus in named if parts[name].splits})
    if problems:
        raise ConfigError(problems)
    return corpora[: len(parts)]


def _overlaps(corpora: Mapping[str, Corpus]) -> Iterator[str]:
    """Yield a problem for each pair of sources that would each train on documents that the other
    holds out: they share files but number their documents differently, and the number decides which
    documents are held out.
    """
    files = {name: [file.resolve() for file in corpus.files] for name, corpus in corpora.items()}
    for one, other in combinations(corpora, 2):
        where, other_where = corpora[one].where, corpora[other].where
        is_apart = any(where[key] != other_where[key] for key in where.keys() & other_where.keys())
        is_alike = where == other_where and files[one] == files[other]
        if is_apart or is_alike or {*files[one]}.isdisjoint(files[other]):
            continue
        yield (
            f"data.mix: {one} and {other} share documents of {corpora[one].path}, and each would "
            "train on documents that the other holds out: set data.eval_path, or name files or "
            "values of where that do not overlap"
        )
