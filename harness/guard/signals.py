"""Stops the run on all ranks together after a stop signal."""

import math
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.errors import ExitCode, RunStopped
from harness.guard.stop_request import StopRequest

T = TypeVar("T")
_TOGETHER = 64  # most ranks in one group


class StopGuard:
    """Makes the ranks agree on whether any was asked to stop, whether all have written their save,
    and whether the budget is used up.

    A rank that stopped alone would leave the others waiting in a collective. Therefore each step
    starts an asynchronous reduction of all flags, read one step later: no rank waits, and all read
    the same. gloo connects every rank with every other. Many ranks are therefore arranged in rows
    and columns; the result of the rows is reduced over the columns in the next step.
    """

    def __init__(self, world_size: int, request: StopRequest | None = None) -> None:
        self.request = request or StopRequest()
        # gloo for any backend of the model, because the flags are on the host. The long timeout
        # leaves hangs to the watchdog.
        timeout = timedelta(days=30)
        self._groups = [
            dist.new_group(
                ranks, timeout, "gloo", use_local_synchronization=len(ranks) < world_size
            )
            for ranks in groups_of(dist.get_rank() if world_size > 1 else 0, world_size)
        ]
        self._flags = [torch.tensor([False, True, False], dtype=torch.int32) for _ in self._groups]
        """(asked to stop, not written, over budget): of this step, and those being reduced over
        rows and columns.
        """
        self._works: list[Any] = []

    @property
    def delay(self) -> int:
        """Number of later calls of `agree` after which all ranks know of a stop."""
        return len(self._groups)

    def stop_if_asked(self) -> None:
        """Raise RunStopped on all ranks if any was asked to stop. Collective; waits."""
        asked = torch.tensor(self.request.received is not None, dtype=torch.int32)
        for group in self._groups:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        if asked:
            raise RunStopped(
                ExitCode.STOPPED, f"asked to stop by {self.request.received or 'a rank'}"
            )

    def agree(self, written: bool = False, is_over: bool = False) -> tuple[bool, bool, bool]:
        """Return (True if any rank was asked to stop, True if all had `written`, True if any was
        over budget), equal on all ranks, as of the previous call or, with rows and columns, of the
        one before it. Collective; does not wait.
        """
        mine = (self.request.received is not None, not written, is_over)
        if not self._groups:
            return mine[0], written, is_over
        stop, unwritten, over = self._read()
        self._flags = [torch.tensor(mine, dtype=torch.int32), *self._flags[:-1]]
        self._works = [
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True)
            for flags, group in zip(self._flags, self._groups, strict=True)
        ]
        return stop, not unwritten, over

    def told_by_rank_0(self, message: T) -> T:
        """Return rank 0's `message` on every rank; waits without a timeout. Collective."""
        messages = [message]
        for group in self._groups:  # first along rank 0's row, then down the columns
            dist.broadcast_object_list(messages, group=group, group_src=0)
        return messages[0]

    def meet(self) -> None:
        """Wait for all ranks, without a timeout. Collective."""
        for group in self._groups:
            dist.all_reduce(torch.zeros(1), group=group)

    def close(self, wait: bool = True) -> None:
        """Restore the signal handlers. `wait` for the pending reduction, except after a failure."""
        if wait:
            self._read()
        self.request.close()

    def _read(self) -> tuple[bool, bool, bool]:
        for work in self._works:
            work.wait()
        self._works = []
        stop, unwritten, over = self._flags[-1].tolist() if self._flags else (False, True, False)
        return bool(stop), bool(unwritten), bool(over)


def groups_of(rank: int, ranks: int) -> list[list[int]]:
    """Return the groups over which a rank's flags are reduced in turn: a single group for up to 64
    ranks or a prime number of them; otherwise the rank's row and column in a table that is as
    square as possible. Empty for one rank.
    """
    columns = math.isqrt(ranks)
    while ranks % columns:
        columns -= 1
    if ranks <= _TOGETHER or columns == 1:
        return [[*range(ranks)]] if ranks > 1 else []
    first = rank - rank % columns
    return [[*range(first, first + columns)], [*range(rank % columns, ranks, columns)]]
