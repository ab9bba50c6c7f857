"""Sums of token losses by group, beside the loss itself. A token's group is the source of its
sample, or a range of positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class _Recorder:
    sums: torch.Tensor
    """(groups,)"""
    numbers: torch.Tensor
    """Group of each sample, (micro_batch,), or of each token, (micro_batch, seq_len)."""
    has_recorded: bool = False


_recorder: _Recorder | None = None


@contextlib.contextmanager
def recording(sums: torch.Tensor | None, numbers: torch.Tensor | None) -> Iterator[None]:
    """Within this context, `record` adds a micro-batch's losses to `sums` (groups,) by the group
    `numbers` of its samples or tokens. Does nothing if either is None.

    Sums become NaN if the loss does not record its tokens.
    """
    global _recorder
    before, own = _recorder, None
    if sums is not None and numbers is not None:
        own = _Recorder(sums, numbers)
    _recorder = own
    try:
        yield
    finally:
        _recorder = before
    if own is not None and not own.has_recorded:
        own.sums.fill_(math.nan)


def is_recording() -> bool:
    """Return True if the losses of single tokens are needed."""
    return _recorder is not None


def record(losses: torch.Tensor) -> None:
    """Add a micro-batch's token losses, in order and 0 without a target. Never synchronises."""
    if _recorder is None:
        return
    sums, numbers = _recorder.sums, _recorder.numbers
    own = losses.detach().double().view(len(numbers), -1)
    if numbers.dim() == 1:
        own = own.sum(1)
        places = torch.arange(len(sums), device=sums.device)
        sums.add_(torch.where(numbers[:, None] == places, own[:, None], 0.0).sum(0))
    else:
        sums.index_add_(0, numbers.flatten(), own.flatten())
    _recorder.has_recorded = True
