"""Builds the tokenizer and sample streams from data.path or data.mix, using the cache."""

from collections.abc import Iterable

from harness.config.data_section import REHEARSED
from harness.data.batches import Contiguous, HeldOutText, Stream
from harness.data.cache import Report
from harness.data.data import Data
from harness.data.mixture import Mixture, epoch_with_old, first_shares, mix_order
from harness.data.packing import require_contiguous
from harness.data.padded import Padded, Pools
from harness.data.prepare import joined, order_key
from harness.data.run_tokenizer import build_tokenizer, cache_of, cached_tokenizer
from harness.data.source import Source, cached_fingerprint_of, open_source
from harness.data.spec import DataSpec
from harness.data.tokenizer import tokenizer_hash
from harness.errors import ConfigError


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

    train = [_stream(source, "train", spec.seed, document_mask=mask) for source in sources]
    order, fingerprint = mix_order(spec, train), joined([s.facts.fingerprint for s in sources])
    # The held-out order ignores the seed, so that all runs are compared on the same samples.
    named = {
        source.name: _stream(source, "train", 0, document_mask=mask_of(source)) for source in sets
    }
    held_out = [*named.values()][:1] or [
        _stream(source, "held_out", 0, document_mask=mask)
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
        kept_out = evaluated([_stream(old, [*old.sides][-1], 0, document_mask=mask_of(old))])
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


def _stream(source: Source, side: str, seed: int, *, document_mask: bool) -> Stream:
    """Return the samples of one side of the split, in the order of a seed."""
    order = order_key(source.facts.fingerprint)
    return Stream(source.sides[side], seed, order, document_mask=document_mask)


def _document_mask(spec: DataSpec, sources: Iterable[Source]) -> bool:
    return spec.config.masks_documents(any(source.is_masked for source in sources))


def _batched(spec: DataSpec, stream: Stream, fingerprint: str) -> Stream:
    """Return the train split in the sample order and batches that data.batching asks for."""
    config, pools = spec.config, None
    if spec.rows is not None:
        require_contiguous(stream.packed, spec.rows)
        return Contiguous(stream.packed, spec.rows)
    if config.batching in ("length_grouped", "token_budget"):
        key = f"{spec.seed}:{order_key(fingerprint)}"
        sizes = config.pool_samples, config.group_samples
        parts = stream.order.parts if isinstance(stream, Mixture) else []
        changes = [part.first for part in parts[1:]]
        pools = Pools(stream.lengths, *sizes, stream.samples, stream.length, key, changes)
    return _padded(spec, stream, pools)


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
