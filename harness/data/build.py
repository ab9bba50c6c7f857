"""Builds streams of samples from data.path, through a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from harness.config.run_config import RunConfig, run_and_step
from harness.config.sections import DataConfig
from harness.data.baselines import unigram_and_bigram_nats
from harness.data.batches import Stream
from harness.data.cache import Report, build_once, cache_key, cached_array, default_cache
from harness.data.corpus import Corpus, find_corpus
from harness.data.fingerprint import order_key
from harness.data.indexed import IndexedTokens
from harness.data.packing import Packed
from harness.data.prepare import (
    FORMAT,
    PROMPTS,
    SPLIT_FACTS,
    SPLIT_FORMAT,
    TOKENS,
    read_facts,
    require_ids_of,
    write_split,
    write_tokens,
)
from harness.data.split import SIDES, load_split
from harness.data.tokenizer import (
    TRAINED_FORMAT,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
    vocab_size,
)
from harness.errors import ConfigError
from harness.files.paths import user_path
from harness.plan.data import shortened
from harness.runfolder import RunFolder

_FIRST_TOKENS = 64  # more than a line of the summary holds


@dataclass(frozen=True)
class DataSpec:
    """Input of build_data."""

    config: DataConfig = field(default_factory=DataConfig)
    seed: int = 0
    """Seed of the order in which the train split is read."""
    model_vocab_size: int | None = None
    """None: the tokenizer's vocabulary size."""
    trust_remote_code: bool = False

    @classmethod
    def of_run(
        cls, run: RunConfig, model_config: Mapping[str, Any], *, trust_remote_code: bool = False
    ) -> DataSpec:
        """Return the spec of a run; initial weights bring their tokenizer."""
        tokenizer = run.data.tokenizer or _tokenizer_of(run.model.init_from)
        config = run.data.model_copy(update={"tokenizer": tokenizer})
        return cls(config, run.train.seed, model_config.get("vocab_size"), trust_remote_code)


def _tokenizer_of(init_from: str | None) -> str | None:
    """Return the tokenizer of initial weights; a run of ours has a folder of its own for it."""
    if init_from is None:
        return None
    folder = RunFolder(run_and_step(init_from)[0]).tokenizer_dir
    return str(folder) if folder.is_dir() else init_from


@dataclass(frozen=True)
class Data:
    """Tokens ready to train on."""

    train: Stream
    held_out: Stream
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    """Hash of the token ids, of their division into documents, and of the tokenizer."""
    corpus: Corpus
    documents: int
    begins: str
    """The first line of the first document, as decoded by the tokenizer."""

    @property
    def tokens(self) -> int:
        """Tokens of both splits, with separators."""
        return self.train.tokens + self.held_out.tokens

    def summary(self) -> str:
        """Return a line about the data, from which users see that it is the right data."""
        left_out = f"; left out: {self.corpus.left_out}" if self.corpus.left_out else ""
        return (
            f"{self.corpus.path}: {self.documents:,} documents, {self.tokens:,} tokens, of which "
            f"{self.held_out.tokens:,} are held out; the first begins {self.begins!r}{left_out}"
        )

    def events(self) -> list[dict[str, str]]:
        """Return the events about the data for the record of a run."""
        if not self.corpus.left_out:
            return []
        message = f"not read as documents of {self.corpus.path}: {self.corpus.left_out}"
        return [{"kind": "left_out", "message": message}]

    @property
    def vocab_size(self) -> int:
        """One more than the tokenizer's largest id."""
        return vocab_size(self.tokenizer)

    @property
    def eos_id(self) -> int:
        """Id of the separator, which ends every document and is a target."""
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def _baselines(self) -> tuple[float, float]:
        return unigram_and_bigram_nats(self.train, self.held_out, self.vocab_size)

    @property
    def unigram_nats(self) -> float:
        """Held-out cross-entropy of a unigram model of the train split, nats per token."""
        return self._baselines[0]

    @property
    def bigram_nats(self) -> float:
        """The same of a bigram model, interpolated with the unigram model."""
        return self._baselines[1]


def build_data(spec: DataSpec, report: Report | None = None) -> Data:
    """Find or build tokenizer, tokens and split in the cache, and open them.

    All ranks may call it at once: one builds, the others wait. `report` receives progress lines.
    Raises ConfigError for problems of the input.
    """
    report = report or (lambda line: None)
    corpus, identity, cache = _open(spec)
    source = spec.config.tokenizer or _trained_tokenizer(corpus, cache, report)
    tokenizer = _load_tokenizer(source, spec)
    num_ids = spec.model_vocab_size or vocab_size(tokenizer)
    key = _tokens_key(identity, tokenizer)
    prefix, prompts = corpus.path, None
    if corpus.kind != "indexed":
        folder = cache / f"tokens-{key}"
        build_once(folder, lambda path: write_tokens(corpus, tokenizer, path, report), report)
        prefix, prompts = folder / TOKENS, cached_array(folder / PROMPTS, np.dtype("i4"))
    tokens = IndexedTokens(prefix)
    folder = build_once(
        _split_folder(cache, key, spec),
        lambda path: write_split(tokens, prompts, tokenizer, spec.config.held_out, path, report),
        report,
    )
    facts = read_facts(folder)
    require_ids_of(tokens, facts, num_ids)
    packed = {
        side: Packed(
            tokens.ids,
            load_split(folder, side),
            seq_len=spec.config.seq_len,
            eos_id=tokenizer.eos_token_id,
            vocab_size=num_ids,
            add_separator=facts.add_separator,
        )
        for side in SIDES
    }
    _require_windows(packed, spec)
    document_mask = spec.config.document_mask
    if document_mask is None:
        document_mask = any(side.split.masks_prompts for side in packed.values())
    # The held-out order is the same for every seed, so that runs are compared on the same samples.
    order = order_key(facts.fingerprint)
    train = Stream(packed["train"], spec.seed, order, document_mask=document_mask)
    held_out = Stream(packed["held_out"], 0, order, document_mask=document_mask)
    begins = _first_line(tokens, tokenizer)
    return Data(train, held_out, tokenizer, facts.fingerprint, corpus, facts.documents, begins)


def _first_line(tokens: IndexedTokens, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = tokens.ids.block(0, min(len(tokens.ids), _FIRST_TOKENS))
    return shortened(str(tokenizer.decode([*ids[ids < vocab_size(tokenizer)].tolist()])))


def cached_fingerprint(spec: DataSpec) -> str | None:
    """Return the fingerprint of build_data's result if it is in the cache, otherwise None.

    Builds nothing. Raises ConfigError for input that build_data would refuse at once.
    """
    corpus, identity, cache = _open(spec)
    source = spec.config.tokenizer or _tokenizer_folder(corpus, cache)
    if isinstance(source, Path) and not source.is_dir():
        return None  # the tokenizer is not trained yet
    key = _tokens_key(identity, _load_tokenizer(source, spec))
    folder = _split_folder(cache, key, spec)
    return read_facts(folder).fingerprint if (folder / SPLIT_FACTS).is_file() else None


def _open(spec: DataSpec) -> tuple[Corpus, list[object], Path]:
    """Return the corpus, its identity, and the cache folder."""
    cache = (
        user_path("data.cache_dir", spec.config.cache_dir)
        if spec.config.cache_dir
        else default_cache()
    )
    try:
        corpus = find_corpus(spec.config.path, spec.config.format)
        return corpus, corpus.identity(), cache
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error


def _load_tokenizer(source: str | Path, spec: DataSpec) -> PreTrainedTokenizerBase:
    """Return the tokenizer. Raises ConfigError if it has more ids than the model."""
    tokenizer = load_tokenizer(source, trust_remote_code=spec.trust_remote_code)
    ids = vocab_size(tokenizer)
    if spec.model_vocab_size is not None and ids > spec.model_vocab_size:
        raise ConfigError(
            f"data.tokenizer: {source} has {ids} ids, the model's vocabulary only "
            f"{spec.model_vocab_size}: set model.overrides.vocab_size={ids}"
        )
    return tokenizer


def _tokens_key(identity: list[object], tokenizer: PreTrainedTokenizerBase) -> str:
    return cache_key(format=FORMAT, corpus=identity, tokenizer=tokenizer_hash(tokenizer))


def _split_folder(cache: Path, key: str, spec: DataSpec) -> Path:
    return (
        cache / f"split-{cache_key(source=key, held_out=spec.config.held_out, format=SPLIT_FORMAT)}"
    )


def _tokenizer_folder(corpus: Corpus, cache: Path) -> Path:
    """Return the cache folder of the tokenizer trained on a corpus."""
    if corpus.kind == "indexed":
        raise ConfigError(
            f"data.path: {corpus.path} holds token ids: set data.tokenizer to the one that wrote "
            "them"
        )
    key = cache_key(format=FORMAT, trained=TRAINED_FORMAT, corpus=corpus.identity())
    return cache / f"tokenizer-{key}"


def _trained_tokenizer(corpus: Corpus, cache: Path, report: Report) -> Path:
    def build(path: Path) -> None:
        report("training a tokenizer")
        train_tokenizer(corpus, path)

    return build_once(_tokenizer_folder(corpus, cache), build, report)


def _require_windows(packed: dict[str, Packed], spec: DataSpec) -> None:
    """Raise ConfigError unless each side has at least one sample."""
    problems = [
        f"data.path: the {side.replace('_', '-')} split has {windows.split.num_tokens} tokens in "
        f"{windows.split.num_documents} documents; one sample takes data.seq_len + 1 = "
        f"{spec.config.seq_len + 1}: give more text, lower data.seq_len, or change data.held_out "
        f"(now {spec.config.held_out})"
        for side, windows in packed.items()
        if not windows.num_windows
    ]
    if problems:
        raise ConfigError(problems)
