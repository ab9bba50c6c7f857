"""Builds the tokenizer and sample streams from data.path or data.mix, using the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from harness.config.data_section import DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE, REHEARSED
from harness.data.batches import Contiguous, HeldOutText, Stream
from harness.data.cache import Report, build_once, cache_key, default_cache
from harness.data.corpus import Corpus
from harness.data.data import Data
from harness.data.mixture import Mixture, epoch_with_old, first_shares, mix_order
from harness.data.padded import Padded, Pools
from harness.data.prepare import FORMAT, joined, order_key
from harness.data.rendering import set_template
from harness.data.source import Source, cached_fingerprint_of, corpus_of, open_source
from harness.data.spec import DataSpec
from harness.data.tokenizer import (
    TRAINED_FORMAT,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
    vocab_size,
)
from harness.errors import ConfigError
from harness.files.paths import user_path


def build_data(spec: DataSpec, report: Report | None = None) -> Data:
    """Build the tokenizer, tokens and splits, or find them in the cache, and open them.

    All ranks may call it concurrently: one builds, the others wait. `report` receives progress
    lines. Raises ConfigError for invalid input.
    """
    report = report or (lambda line: None)
    parts, cache = spec.sources(), cache_of(spec)
    tokenizer = build_tokenizer(spec, report)
    sources, sets = (
        tuple(open_source(name, part, tokenizer, cache, report) for name, part in named.items())
        for named in (parts, spec.eval_sets())
    )
    spec.require_tokenizer(tokenizer_hash(tokenizer))
    old = None
    if (old_set := spec.old_set()) is not None:
        old = open_source(REHEARSED, old_set, tokenizer, cache, report)
    every = [*sources, *sets, *([old] if old else [])]
    if problems := [problem for source in every for problem in source.problems(spec)]:
        raise ConfigError(problems)
    mask = _document_mask(spec, sources)  # held-out sets must not change what training computes

    def mask_of(held_out: Source) -> bool:
        return _document_mask(spec, (*sources, held_out))

    train = [source.stream("train", spec.seed, document_mask=mask) for source in sources]
    order, fingerprint = mix_order(spec, train), joined([s.facts.fingerprint for s in sources])
    # The held-out order ignores the seed, so that all runs are compared on the same samples.
    named = {
        source.name: source.stream("train", 0, document_mask=mask_of(source)) for source in sets
    }
    held_out = [*named.values()][:1] or [
        source.stream("held_out", 0, document_mask=mask)
        for source in (sources[:-1] if spec.rehearses else sources)
    ]

    def evaluated(streams: list[Stream]) -> Stream:
        mixed = Mixture(streams, first_shares(order, len(streams))) if streams[1:] else streams[0]
        return _evaluated(spec, mixed)

    eval_sets = {name: evaluated([stream]) for name, stream in named.items()}
    long_held_out = kept_out = None
    if length := spec.eval_seq_len:
        long_held_out = evaluated([stream.of_length(length) for stream in held_out])
    if old:  # its last split is held out
        kept_out = evaluated([old.stream([*old.sides][-1], 0, document_mask=mask_of(old))])
    if order is not None:
        train = [Mixture(train, order, epoch_with_old(spec, train))]
    return Data(
        _batched(spec, train[0], fingerprint),
        next(iter(eval_sets.values()), None) or evaluated(held_out),
        tokenizer,
        fingerprint,
        sources,
        {name: stream for name, stream in eval_sets.items() if name},
        sets,
        long_held_out,
        kept_out,
        old,
    )


def _document_mask(spec: DataSpec, sources: Iterable[Source]) -> bool:
    """Return data.document_mask; by default True if prompts of a source are masked."""
    if (mask := spec.config.document_mask) is not None:
        return mask
    # A document alone in its sample needs no mask.
    return spec.config.batching == "packed" and any(source.is_masked for source in sources)


def _batched(spec: DataSpec, stream: Stream, fingerprint: str) -> Stream:
    """Return the train split in the sample order and batches that data.batching asks for."""
    config, pools = spec.config, None
    if spec.rows is not None:
        return _contiguous(stream, spec.rows)
    if config.batching in ("length_grouped", "token_budget"):
        key = f"{spec.seed}:{order_key(fingerprint)}"
        sizes = config.pool_samples, config.group_samples
        parts = stream.order.parts if isinstance(stream, Mixture) else []
        changes = [part.first for part in parts[1:]]
        pools = Pools(stream.lengths, *sizes, stream.samples, stream.length, key, changes)
    return _padded(spec, stream, pools)


def _contiguous(stream: Stream, rows: int) -> Stream:
    """Return the train split as contiguous streams. Raises ConfigError if it has too few windows or
    they hold whole documents.
    """
    if stream.holds_whole_documents:
        raise ConfigError(
            "train.carry_state is true, but windows hold whole documents (data.packing, the "
            "default if prompts are masked): set data.packing=stream, or train.carry_state=false"
        )
    if rows > stream.samples:
        raise ConfigError(
            f"train.carry_state is true, but {stream.samples} windows are too few for {rows} "
            "streams of text (train.global_batch): lower train.global_batch or data.seq_len, or "
            "add text"
        )
    return Contiguous(stream.packed, rows)


def _evaluated(spec: DataSpec, stream: Stream) -> Stream:
    """Return held-out samples in the order and batches of an evaluation."""
    if spec.rows is None or stream.holds_whole_documents:
        return _padded(spec, stream)
    samples = stream.samples
    if spec.eval_samples is not None:
        samples = -(-spec.eval_samples * spec.config.seq_len // stream.seq_len)
    return HeldOutText(stream.packed, samples)


def _padded(spec: DataSpec, stream: Stream, pools: Pools | None = None) -> Stream:
    """Return a stream that pads each batch to its longest sample, if data.batching asks for it."""
    if spec.config.batching == "packed":
        return stream
    by_tokens = spec.config.batching == "token_budget"
    return Padded(stream, pools, pad_to=spec.pad_to, by_tokens=by_tokens)


def cached_fingerprint(spec: DataSpec) -> str | None:
    """Return the fingerprint of build_data's result if it is cached, otherwise None.

    Builds nothing. Raises ConfigError for input that build_data would reject at once.
    """
    tokenizer = cached_tokenizer(spec)
    if tokenizer is None:
        return None
    cache, parts = cache_of(spec), [*spec.sources().values()]
    fingerprints = [cached_fingerprint_of(part, tokenizer, cache) for part in parts]
    cached = [fingerprint for fingerprint in fingerprints if fingerprint is not None]
    return joined(cached) if len(cached) == len(parts) else None


def build_tokenizer(spec: DataSpec, report: Report) -> PreTrainedTokenizerBase:
    """Return the tokenizer for build_data; one process trains it if needed.

    Raises ConfigError for problems with the tokenizer or any source.
    """
    source: str | Path | None = spec.config.tokenizer
    corpora = _corpora(spec)
    if source is None:
        source = _tokenizer_folder(corpora, spec)

        def build(path: Path) -> None:
            report("training a tokenizer")
            train_tokenizer(corpora, path, spec.config.vocab_size)

        build_once(source, build, report)
    return _load_tokenizer(source, spec)


def cached_tokenizer(spec: DataSpec) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of build_tokenizer if it need not be trained, otherwise None.

    Raises ConfigError as build_tokenizer does.
    """
    corpora = _corpora(spec)
    source = spec.config.tokenizer or _tokenizer_folder(corpora, spec)
    if isinstance(source, Path) and not source.is_dir():
        return None
    return _load_tokenizer(source, spec)


def _corpora(spec: DataSpec) -> list[Corpus]:
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


def cache_of(spec: DataSpec) -> Path:
    """Return the cache folder of a run."""
    if spec.config.cache_dir:
        return user_path("data.cache_dir", spec.config.cache_dir)
    return default_cache()


def _load_tokenizer(source: str | Path, spec: DataSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises ConfigError if it has more ids than the model's vocabulary, unless
    rows may be added.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=spec.trust_remote_code)
    if spec.config.template is not None:
        set_template(tokenizer, spec.config.template)
    ids = vocab_size(tokenizer)
    rows = spec.model_vocab_size
    if rows is not None and ids > rows and not spec.adds_rows:
        raise ConfigError(
            f"data.tokenizer: {source} has {ids} ids, but the model's vocabulary has {rows}: set "
            f"model.overrides.vocab_size={ids}{_or_fewer(spec, tokenizer)}"
        )
    return tokenizer


def _or_fewer(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the other remedy for a tokenizer trained here, a smaller vocabulary, if its characters
    alone would fit; otherwise "".
    """
    rows = spec.model_vocab_size or 0
    least = sum(len(piece) == 1 or piece.startswith("<") for piece in tokenizer.get_vocab())
    is_enough = not spec.config.tokenizer and rows >= max(least, MIN_VOCAB_SIZE)
    return f" or data.vocab_size={rows}" if is_enough else ""


def _tokenizer_folder(corpora: Sequence[Corpus], spec: DataSpec) -> Path:
    """Return the cache folder of a tokenizer trained on the text of all sources."""
    for corpus in corpora:
        if corpus.kind == "indexed":
            raise ConfigError(
                f"data.path: {corpus.path} holds token ids: set data.tokenizer to the one that "
                "wrote them"
            )
    identities = [corpus.identity() for corpus in corpora]
    identity = identities[0] if len(corpora) == 1 else identities
    # The default size was once the only one: leaving it out keeps the cache keys of that time.
    pieces = spec.config.vocab_size
    size = {} if pieces == DEFAULT_VOCAB_SIZE else {"vocab_size": pieces}
    key = cache_key(format=FORMAT, trained=TRAINED_FORMAT, corpus=identity, **size)
    return cache_of(spec) / f"tokenizer-{key}"
