"""Shares of a mixture's sources, and the order of its samples that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from harness.config.data_section import MixSource
from harness.data.batches import Stream
from harness.data.mix_order import MixOrder, Phase
from harness.data.spec import DataSpec


def epoch_with_old(spec: DataSpec, streams: Sequence[Stream]) -> int | None:
    """Return the samples of an epoch of the new data, with those rehearsed in it; None without."""
    if not spec.rehearses:
        return None
    new = sum(stream.samples for stream in _new(spec, streams))
    return round(new / (1 - spec.config.rehearse_share))


def mix_order(spec: DataSpec, streams: Sequence[Stream]) -> MixOrder | None:
    """Return the order of a mixture's samples, from shares or from the streams' sizes; None
    without one.
    """
    config = spec.config
    if not config.mix and not spec.rehearses:
        return None
    phases = [Phase(0, _shares(spec, "share", streams))]
    if spec.until_sample is not None:
        phases.append(Phase(spec.until_sample, _shares(spec, "then", streams)))
    limits = [
        _limit(*pair) for pair in zip(config.mix, _new(spec, streams), strict=bool(config.mix))
    ]
    return MixOrder(phases, limits + [None] * (len(streams) - len(limits)))


def _limit(source: MixSource, stream: Stream) -> int | None:
    return None if source.epochs is None else max(1, int(source.epochs * stream.samples))


def first_shares(order: MixOrder | None, sources: int) -> MixOrder:
    """Return the order of the held-out samples of a mixture's first sources: by its first shares,
    without a limit.
    """
    assert order is not None, "several splits are those of a mixture"
    weights = order.parts[0].weights[:sources]
    return MixOrder([Phase(0, tuple(map(Fraction, weights)))], [None] * len(weights))


def _shares(spec: DataSpec, key: str, streams: Sequence[Stream]) -> tuple[Fraction, ...]:
    """Return the shares of the samples under a key of data.mix."""
    config = spec.config
    by_tokens = config.mix_by == "tokens"
    per_sample = [stream.tokens_per_sample if by_tokens else Fraction(1) for stream in streams]
    values = [getattr(source, key) for source in config.mix] or [1]
    if values[0] is None:
        new = _new(spec, streams)
        sizes = [each * of.samples for each, of in zip(per_sample, new, strict=False)]
        power = 1 / (config.mix_temperature or 1)
        values = [size if power == 1 else float(size) ** power for size in sizes]
    exact = [v if isinstance(v, Fraction) else Fraction(repr(v)) for v in values]
    if spec.rehearses:
        old = Fraction(repr(config.rehearse_share))
        exact = [*(share * (1 - old) / sum(exact) for share in exact), old]
    return tuple(share / each for share, each in zip(exact, per_sample, strict=True))


def _new(spec: DataSpec, streams: Sequence[Stream]) -> Sequence[Stream]:
    """Return the streams without the one that is rehearsed, which is the last."""
    return streams[:-1] if spec.rehearses else streams
