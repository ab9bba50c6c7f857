"""Signals become one decision of all ranks, at a step boundary."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import ExitCode, RunStopped
from harness.guard.stop_request import StopRequest


class StopGuard:
    """Knows whether any rank was asked to stop, and whether all have written what they save.

    Ranks get their signals at different times, and a rank that stopped alone would leave the
    others waiting in a collective. So each step starts an asynchronous reduction of everyone's
    flag, which is read one step later: no waiting, and all ranks read the same answer.
    """

    def __init__(self, world_size: int, request: StopRequest | None = None) -> None:
        self.request = request or StopRequest()
        # gloo, whatever the model talks over: the flags live on the host.
        # What does not end is the watchdog's to judge, not the group's.
        timeout = timedelta(days=30)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None

    @property
    def received(self) -> str | None:
        """What asked this rank to stop; None where nothing has."""
        return self.request.received

    def stop_if_asked(self) -> None:
        """Raise RunStopped on all ranks where one of them was asked to stop. Waits for all."""
        asked = torch.tensor(self.received is not None, dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        if asked:
            raise RunStopped(ExitCode.STOPPED, f"asked to stop by {self.received or 'a rank'}")

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

    def told_by_rank_0(self, text: str | None) -> str | None:
        """Rank 0's `text` on every rank, however long rank 0 takes until it says it."""
        told = [text]
        if self._group is not None:
            dist.broadcast_object_list(told, group=self._group)
        return told[0]

    def close(self, wait: bool = True) -> None:
        """Give the signals back. `wait`: let the reduction under way end; not after a failure,
        when the other ranks may never join it.
        """
        if wait:
            self._read()
        self.request.close()

    def _read(self) -> tuple[bool, bool]:
        if self._work is None:
            return False, False
        self._work.wait()
        self._work = None
        stop, unwritten = self._flags.tolist()
        return bool(stop), not unwritten
