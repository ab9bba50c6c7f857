"""Documents that are too short or too long to be read (data.min_tokens, data.max_tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenBounds:
    """Tokens of the documents that are read, with the separator that ends each."""

    least: int | None = None
    most: int | None = None

    def outside(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which documents are shorter, and which are longer."""
        none = np.zeros(len(lengths), dtype=bool)
        return (
            none if self.least is None else lengths < self.least,
            none if self.most is None else lengths > self.most,
        )

    def text(self) -> str:
        """Return the bounds as text; "" without any."""
        parts = [
            f"data.{key}={value}"
            for key, value in (("min_tokens", self.least), ("max_tokens", self.most))
            if value is not None
        ]
        return ", ".join(parts)


ANY_LENGTH = TokenBounds()


@dataclass(frozen=True)
class LeftOut:
    """Numbers of documents that are not read."""

    shorter: int = 0
    longer: int = 0

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.shorter + other.shorter, self.longer + other.longer)

    def text(self, bounds: TokenBounds) -> str:
        """Return the counts as text; "" where all documents are read."""
        parts = [
            f"{count:,} {what} than {bound:,} tokens"
            for count, what, bound in (
                (self.shorter, "shorter", bounds.least), (self.longer, "longer", bounds.most),
            )
            if count
        ]  # fmt: skip
        return " and ".join(parts)
