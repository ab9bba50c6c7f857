"""Signals become one decision of all ranks, at a step boundary."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.errors import ExitCode, RunStopped
from harness.guard.stop_request import StopRequest

T = TypeVar("T")
_TOGETHER = 64  # ranks that agree in one group


class StopGuard:
    """Agrees between ranks whether any was asked to stop, and whether all have written their save.

    Ranks get signals at different times, and a rank that stopped alone would leave the others
    waiting in a collective. So each step starts an asynchronous reduction of all flags, which is
    read one step later: no waiting, and all ranks read the same answer. gloo hands the flags from
    rank to rank, and connects each rank to each: many ranks stand in rows and columns, and the
    answer of the rows goes through the columns in the next step.
    """

    def __init__(self, world_size: int, request: StopRequest | None = None) -> None:
        self.request = request or StopRequest()
        # gloo, whatever backend the model uses: the flags are on the host.
        # The watchdog ends a hang, not this group's timeout.
        timeout = timedelta(days=30)
        self._groups = [
            dist.new_group(
                ranks, timeout, "gloo", use_local_synchronization=len(ranks) < world_size
            )
            for ranks in groups_of(dist.get_rank() if world_size > 1 else 0, world_size)
        ]
        self._flags = [torch.tensor([False, True], dtype=torch.int32) for _ in self._groups]
        """(asked to stop, not written) of this step, and on their way through rows and columns."""
        self._works: list[Any] = []

    @property
    def received(self) -> str | None:
        """Name of the signal or reason that asked this rank to stop; None if none did."""
        return self.request.received

    def stop_if_asked(self) -> None:
        """Raise RunStopped on all ranks if any was asked to stop. Collective; waits for all."""
        asked = torch.tensor(self.received is not None, dtype=torch.int32)
        for group in self._groups:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        if asked:
            raise RunStopped(ExitCode.STOPPED, f"asked to stop by {self.received or 'a rank'}")

    def agree(self, written: bool = False) -> tuple[bool, bool]:
        """Return (True if any rank was asked to stop, True if all had `written`) as of the previous
        call, of many ranks the one before, equal on all ranks. Collective, without waiting.
        """
        mine = (self.received is not None, not written)
        if not self._groups:
            return mine[0], written
        stop, unwritten = self._read()
        self._flags = [torch.tensor(mine, dtype=torch.int32), *self._flags[:-1]]
        self._works = [
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True)
            for flags, group in zip(self._flags, self._groups, strict=True)
        ]
        return stop, not unwritten

    def told_by_rank_0(self, message: T) -> T:
        """Return rank 0's `message` on every rank; waits without a time limit. Collective."""
        messages = [message]
        for group in self._groups:  # along rank 0's row, then from it down all columns
            dist.broadcast_object_list(messages, group=group, group_src=0)
        return messages[0]

    def close(self, wait: bool = True) -> None:
        """Restore the signal handlers.

        `wait`: for the pending reduction; not after a failure: other ranks may never join it.
        """
        if wait:
            self._read()
        self.request.close()

    def _read(self) -> tuple[bool, bool]:
        for work in self._works:
            work.wait()
        self._works = []
        stop, unwritten = self._flags[-1].tolist() if self._flags else (False, True)
        return bool(stop), bool(unwritten)


def groups_of(rank: int, ranks: int) -> list[list[int]]:
    """Return the groups in which a rank agrees with all, one after the other: all ranks, or of more
    than 64 its row and its column of as square a table as their number allows; none for one rank.
    """
    columns = math.isqrt(ranks)
    while ranks % columns:
        columns -= 1
    if ranks <= _TOGETHER or columns == 1:
        return [[*range(ranks)]] if ranks > 1 else []
    first = rank - rank % columns
    return [[*range(first, first + columns)], [*range(rank % columns, ranks, columns)]]
