"""Signals become one decision of all ranks, at a step boundary."""

from __future__ import annotations

import signal
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# Ctrl-C; a batch system's end; a batch system's early warning.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopGuard:
    """Knows whether any rank was asked to stop, and whether all have written what they save.

    Ranks get their signals at different times, and a rank that stopped alone would leave the
    others waiting in a collective. So each step starts an asynchronous reduction of everyone's
    flag, which is read one step later: no waiting, and all ranks read the same answer.
    """

    def __init__(self, world_size: int) -> None:
        self.received: str | None = None
        # gloo, whatever the model talks over: the flags live on the host.
        # What does not end is the watchdog's to judge, not the group's.
        timeout = timedelta(days=30)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}

    def agree(self, written: bool = False) -> tuple[bool, bool]:
        """Whether any rank had been asked to stop, and whether all had `written`, when this was
        last called; the same on all ranks.
        """
        mine = (self.received is not None, not written)
        if self._group is None:
            return mine[0], written
        agreed = self._read()
        self._flags = torch.tensor(mine, dtype=torch.int32)
        self._work = dist.all_reduce(
            self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def wait_for_all(self) -> None:
        """Return when every rank has come here, however long one of them takes."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def close(self, wait: bool = True) -> None:
        """Give the signals back. `wait`: let the reduction under way end; not after a failure,
        when the other ranks may never join it.
        """
        if wait:
            self._read()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _read(self) -> tuple[bool, bool]:
        if self._work is None:
            return False, False
        self._work.wait()
        self._work = None
        stop, unwritten = self._flags.tolist()
        return bool(stop), not unwritten

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
