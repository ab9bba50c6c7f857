"""Mixtures of sources: their samples, in an order that is computed directly at any index.

Shares become whole numbers of samples per `period`. Within a period, a source's next sample becomes
due when the source's share of all samples so far reaches it; of the samples that are due, the one
with the earliest deadline is taken. So each source is always within one sample of its share: the
sources are the periodic tasks of Baruah et al., "Proportionate progress" (Algorithmica 15, 1996),
on one processor. All periods are alike, so one period is computed and the others follow from it.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from harness.config.data_section import MixSource
from harness.data.batch import Batch
from harness.data.batches import Sample, Stream
from harness.data.packing import Document, Packed
from harness.data.spec import DataSpec
from harness.errors import ConfigError

MOST_PERIOD = 1 << 16
"""Longest period in samples; shares that need a longer one are rounded."""


@dataclass(frozen=True)
class Phase:
    """Shares of all sources from sample `first` on; they need not add up to 1."""

    first: int
    shares: tuple[Fraction, ...]


class MixOrder:
    """Assigns samples to sources, in shares that stay constant except at a few samples."""

    def __init__(self, phases: Sequence[Phase], limits: Sequence[int | None]) -> None:
        """`limits`: maximum samples per source; its share then goes to the others."""
        self.parts: list[_Part] = []
        """Runs of samples with constant shares."""
        self.length: int | None = None
        """Samples until every source with a share has reached its limit; None: endless."""
        drawn, first = [0] * len(limits), 0
        ends = [phase.first for phase in phases[1:]]
        for phase, end in zip(phases, [*ends, None], strict=True):
            while end is None or first < end:
                shares = [
                    share if limit is None or count < limit else Fraction(0)
                    for share, limit, count in zip(phase.shares, limits, drawn, strict=True)
                ]
                if not any(shares):
                    self.length = first
                    return
                part = _Part(first, weights_of(shares), tuple(drawn))
                self.parts.append(part)
                reached = [
                    part.end_of(source, limit)
                    for source, limit in enumerate(limits)
                    if limit is not None and part.weights[source]
                ]
                stops = [stop for stop in (*reached, end) if stop is not None]
                if not stops:
                    return
                first = min(stops)
                drawn = part.drawn_before(first)

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source, index in the source) of each global sample."""
        part_of = np.searchsorted([part.first for part in self.parts], samples, side="right") - 1
        sources, within = np.empty_like(samples), np.empty_like(samples)
        for number in set(part_of.tolist()):
            here = part_of == number
            sources[here], within[here] = self.parts[number].places(samples[here])
        return sources, within

    def drawn_before(self, sample: int) -> list[int]:
        """Return the number of samples per source before a global sample."""
        part = [part for part in self.parts if part.first <= sample][-1]
        return part.drawn_before(sample)


class _Part:
    """Samples from `first` on, with constant shares."""

    def __init__(self, first: int, weights: tuple[int, ...], before: tuple[int, ...]) -> None:
        self.first, self.weights, self._before = first, weights, np.array(before)
        self._sources = one_period(weights)
        by_source = np.argsort(self._sources, kind="stable")
        starts = np.cumsum(weights) - weights
        self._of_source = np.split(by_source, starts[1:])  # indices in the period
        self._ranks = np.empty_like(by_source)
        self._ranks[by_source] = np.arange(len(by_source)) - np.repeat(starts, weights)

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        periods, rest = np.divmod(samples - self.first, len(self._sources))
        sources = self._sources[rest]
        per_period = np.array(self.weights)[sources]
        return sources, self._before[sources] + periods * per_period + self._ranks[rest]

    def drawn_before(self, sample: int) -> list[int]:
        periods, rest = divmod(sample - self.first, len(self._sources))
        begun = np.bincount(self._sources[:rest], minlength=len(self.weights))
        drawn: list[int] = (self._before + periods * np.array(self.weights) + begun).tolist()
        return drawn

    def end_of(self, source: int, limit: int) -> int:
        """Return the global sample index just after the one at which a source reaches its limit."""
        left = limit - int(self._before[source])
        periods, rest = divmod(left - 1, self.weights[source])
        place = int(self._of_source[source][rest])
        return self.first + periods * len(self._sources) + place + 1


def weights_of(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return integers in proportion to `shares`, adding up to at most MOST_PERIOD.

    Shares that need a longer period are rounded to multiples of 1/MOST_PERIOD, none of them to 0.
    """
    total = sum(shares)
    parts = [share / total for share in shares]
    period = math.lcm(*(part.denominator for part in parts))
    if period <= MOST_PERIOD:
        return tuple(int(part * period) for part in parts)
    weights = [max(int(part * MOST_PERIOD), int(part > 0)) for part in parts]
    nearest = sorted(range(len(parts)), key=lambda n: weights[n] - parts[n] * MOST_PERIOD)
    for source in nearest[: max(0, MOST_PERIOD - sum(weights))]:
        weights[source] += 1
    return tuple(weights)


def one_period(weights: Sequence[int]) -> NDArray[np.int64]:
    """Return the source of each sample of a period, which holds `weights[i]` samples of source i.

    Of P samples in a period, the j-th sample (from 0) of a source with weight w is due between
    floor(j * P / w) and ceil((j + 1) * P / w).
    """
    period = sum(weights)
    waiting = [(0, source, 0) for source, weight in enumerate(weights) if weight]  # due from
    ready: list[tuple[int, int, int]] = []  # due until
    sources = np.empty(period, dtype=np.int64)
    heapq.heapify(waiting)
    for sample in range(period):
        while waiting and waiting[0][0] <= sample:
            _, source, number = heapq.heappop(waiting)
            due = -(-(number + 1) * period // weights[source])
            heapq.heappush(ready, (due, source, number))
        _, source, number = heapq.heappop(ready)
        sources[sample] = source
        if number + 1 < weights[source]:
            begin = (number + 1) * period // weights[source]
            heapq.heappush(waiting, (begin, source, number + 1))
    return sources


class Mixture(Stream):
    """The samples of several streams, each in its own order, endless or up to a limit.

    A sample's source and window depend only on its global index.
    """

    def __init__(
        self, streams: Sequence[Stream], order: MixOrder, samples: int | None = None
    ) -> None:
        """`samples`: samples per epoch; None: as many as all streams together have."""
        self.streams, self.order, self.length = streams, order, order.length
        samples = sum(stream.samples for stream in streams) if samples is None else samples
        self.samples = samples if self.length is None else min(samples, self.length)
        self.at_once, self.seq_len = self.samples, streams[0].seq_len
        self.tokens = sum(stream.tokens for stream in streams)
        self.documents = sum(stream.documents for stream in streams)
        self.is_masked = any(stream.is_masked for stream in streams)
        self.document_mask = any(stream.document_mask for stream in streams)
        self.holds_whole_documents = any(stream.holds_whole_documents for stream in streams)

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of the (n,) samples in tokens, without padding."""
        lengths = np.empty_like(samples)
        for stream, (rows, within) in zip(self.streams, self._by_source(samples), strict=True):
            lengths[rows] = stream.lengths(within)
        return lengths

    def targets_by_source(self, samples: NDArray[np.int64]) -> list[int]:
        """Return the number of target tokens per source in some samples."""
        return [
            stream.targets_of(within)
            for stream, (_, within) in zip(self.streams, self._by_source(samples), strict=True)
        ]

    def targets_of(self, samples: NDArray[np.int64]) -> int:
        """Return the number of target tokens in some samples."""
        return sum(self.targets_by_source(samples))

    def documents_of(self, index: int) -> list[Document]:
        """Return the documents of the sample at a global index, as tokens."""
        source, within = (place.item() for place in self.order.places(np.array([index])))
        return self.streams[source].documents_of(within)

    def sample(self, index: int) -> Sample:
        """Return the sample at a global index, with its source and the document spans it holds."""
        source, within = (place.item() for place in self.order.places(np.array([index])))
        return replace(self.streams[source].sample(within), source=source)

    def _by_source(
        self, samples: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return, per source, (rows among `samples`, sample indices in the source)."""
        if self.length is not None and samples.size and samples.max() >= self.length:
            raise ConfigError(f"data.mix: its sources run out after {self.length:,} samples")
        sources, within = self.order.places(samples)
        rows = [np.flatnonzero(sources == number) for number in range(len(self.streams))]
        return [(of_source, within[of_source]) for of_source in rows]

    def windows_of(self, samples: NDArray[np.int64]) -> list[tuple[Packed, NDArray[np.int64]]]:
        """Return the windows of some samples, by source."""
        return [
            part
            for number, (_, within) in enumerate(self._by_source(samples))
            for part in self.streams[number].windows_of(within)
        ]

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        rows_of, batches, numbers = [], [], []
        for number, (rows, within) in enumerate(self._by_source(samples)):
            if rows.size:
                rows_of.append(rows)
                batches.append(self.streams[number]._read(within))
                numbers.append(np.full(rows.size, number))
        back = np.argsort(np.concatenate(rows_of))

        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts)[back]

        segments, pairs = list[torch.Tensor](), list[torch.Tensor]()
        for batch in batches:
            if batch.segments is not None and batch.reference is not None:
                before = 2 * sum(map(len, pairs))
                segments.append(torch.where(batch.segments < 0, -1, batch.segments + before))
                pairs.append(batch.reference)
        positions = [batch.position_ids for batch in batches if batch.position_ids is not None]
        return Batch(
            joined([batch.input_ids for batch in batches]),
            joined([batch.labels for batch in batches]),
            joined(positions) if self.document_mask else None,
            sources=torch.from_numpy(np.concatenate(numbers)[back]),
            segments=joined(segments) if segments else None,
            reference=torch.cat(pairs) if pairs else None,
        )


def epoch_with_old(spec: DataSpec, streams: Sequence[Stream]) -> int | None:
    """Return the samples per epoch of the new data, including the rehearsed samples among them;
    None if no old data is mixed in.
    """
    if not spec.rehearses:
        return None
    new = sum(stream.samples for stream in _new(spec, streams))
    return round(new / (1 - spec.config.rehearse_share))


def mix_order(spec: DataSpec, streams: Sequence[Stream]) -> MixOrder | None:
    """Return the sample order of a mixture, from its shares or the streams' sizes, or None."""
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
    """Return the order of held-out samples: `sources` sources in their shares at the start of the
    run, without limits.
    """
    assert order is not None, "several splits are those of a mixture"
    weights = order.parts[0].weights[:sources]
    return MixOrder([Phase(0, tuple(map(Fraction, weights)))], [None] * len(weights))


def _shares(spec: DataSpec, key: str, streams: Sequence[Stream]) -> tuple[Fraction, ...]:
    """Return the shares in samples, from a key of data.mix."""
    config = spec.config
    by_tokens = config.mix_by == "tokens"
    per_sample = [stream.tokens_per_sample if by_tokens else Fraction(1) for stream in streams]
    values = [getattr(source, key) for source in config.mix] or [1]
    if values[0] is None:
        new = _new(spec, streams)
        sizes = [each * stream.samples for each, stream in zip(per_sample, new, strict=False)]
        power = 1 / (config.mix_temperature or 1)
        values = [size if power == 1 else float(size) ** power for size in sizes]
    exact = [v if isinstance(v, Fraction) else Fraction(repr(v)) for v in values]
    if spec.rehearses:
        old = Fraction(repr(config.rehearse_share))
        exact = [*(share * (1 - old) / sum(exact) for share in exact), old]
    return tuple(share / each for share, each in zip(exact, per_sample, strict=True))


def _new(spec: DataSpec, streams: Sequence[Stream]) -> Sequence[Stream]:
    """Return the streams without the rehearsed one, which is the last."""
    return streams[:-1] if spec.rehearses else streams
