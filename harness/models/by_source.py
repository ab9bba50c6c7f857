"""Sums of token losses by a number of each token, beside the loss that is learned from or asked
for: the source of its sample, or its place among the tokens that it sees.
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
    """(numbers,)"""
    numbers: torch.Tensor
    """(micro_batch,): the number of each sample's tokens; or (micro_batch, seq_len)."""
    has_recorded: bool = False


_recorder: _Recorder | None = None


@contextlib.contextmanager
def recording(sums: torch.Tensor | None, numbers: torch.Tensor | None) -> Iterator[None]:
    """Within this, `record` adds to `sums` (numbers,) the losses of a micro-batch whose samples,
    or whose tokens, have these `numbers`; without either it does nothing.

    Sums of a loss that does not record its tokens' are no numbers.
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
    """Return True if the losses of single tokens are wanted."""
    return _recorder is not None


def record(losses: torch.Tensor) -> None:
    """Add the losses of a micro-batch's tokens, in its order and 0 without a target. No wait."""
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
