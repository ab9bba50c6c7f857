"""Samples of several streams in the order of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from harness.data.batch import Batch
from harness.data.batches import Sample, Stream
from harness.data.mix_order import MixOrder
from harness.data.packing import Document
from harness.errors import ConfigError


class Mixture(Stream):
    """The samples of several streams, each in its own order, endless or up to a limit.

    A sample's source and window depend only on its global index.
    """

    def __init__(
        self, streams: Sequence[Stream], order: MixOrder, samples: int | None = None
    ) -> None:
        """`samples`: samples per epoch; None: as many as all streams together have."""
        self.streams, self.order = streams, order
        self._samples = sum(stream.samples for stream in streams) if samples is None else samples
        self.document_mask = any(stream.document_mask for stream in streams)

    @property
    def holds_whole_documents(self) -> bool:
        """True if the samples of some source hold whole documents and padding."""
        return any(stream.holds_whole_documents for stream in self.streams)

    @property
    def samples(self) -> int:
        """Number of samples in an epoch of every source, or in the mixture if fewer."""
        length = self.order.length
        return self._samples if length is None else min(self._samples, length)

    @property
    def length(self) -> int | None:
        """Samples until all sources have reached their limits; None if the mixture is endless."""
        return self.order.length

    @property
    def tokens(self) -> int:
        """Number of tokens in all sources."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def documents(self) -> int:
        """Number of documents of all sources that windows are made of."""
        return sum(stream.documents for stream in self.streams)

    @property
    def is_masked(self) -> bool:
        """True if the loss mask excludes some tokens of some source."""
        return any(stream.is_masked for stream in self.streams)

    @property
    def seq_len(self) -> int:
        """Length of a sample in tokens, with padding."""
        return self.streams[0].seq_len

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

        positions = [batch.position_ids for batch in batches if batch.position_ids is not None]
        return Batch(
            joined([batch.input_ids for batch in batches]),
            joined([batch.labels for batch in batches]),
            joined(positions) if self.document_mask else None,
            sources=torch.from_numpy(np.concatenate(numbers)[back]),
        )
