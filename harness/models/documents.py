"""Document boundaries in attention masks, without a wait of the host in every forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import masking_utils


@contextlib.contextmanager
def separating(documents: bool) -> Iterator[None]:
    """Within this, models attend within the `documents` that `position_ids` number, or there are
    none to separate.

    transformers looks at positions on the device to see which, and waits for the answer.
    """
    utils: Any = masking_utils
    original = utils.find_packed_sequence_indices
    utils.find_packed_sequence_indices = _numbered if documents else _unnumbered
    try:
        yield
    finally:
        utils.find_packed_sequence_indices = original


def _numbered(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row, (micro_batch, seq_len)."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


def _unnumbered(position_ids: torch.Tensor) -> None:
    """Return what masks of one document in each row are made of."""
