"""Signals become one decision of all ranks, at a step boundary."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.errors import ExitCode, RunStopped
from harness.guard.stop_request import StopRequest

T = TypeVar("T")


class StopGuard:
    """Agrees between ranks whether any was asked to stop, and whether all have written their save.

    Ranks get signals at different times, and a rank that stopped alone would leave the others
    waiting in a collective. So each step starts an asynchronous reduction of all flags, which is
    read one step later: no waiting, and all ranks read the same answer.
    """

    def __init__(self, world_size: int, request: StopRequest | None = None) -> None:
        self.request = request or StopRequest()
        # gloo, whatever backend the model uses: the flags are on the host.
        # The watchdog ends a hang, not this group's timeout.
        timeout = timedelta(days=30)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None

    @property
    def received(self) -> str | None:
        """Name of the signal or reason that asked this rank to stop; None if none did."""
        return self.request.received

    def stop_if_asked(self) -> None:
        """Raise RunStopped on all ranks if any was asked to stop. Collective; waits for all."""
        asked = torch.tensor(self.received is not None, dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        if asked:
            raise RunStopped(ExitCode.STOPPED, f"asked to stop by {self.received or 'a rank'}")

    def agree(self, written: bool = False) -> tuple[bool, bool]:
        """Return (True if any rank was asked to stop, True if all had `written`) as of the previous
        call, equal on all ranks. Collective, without waiting.
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

    def told_by_rank_0(self, message: T) -> T:
        """Return rank 0's `message` on every rank; waits without a time limit. Collective."""
        messages = [message]
        if self._group is not None:
            dist.broadcast_object_list(messages, group=self._group)
        return messages[0]

    def close(self, wait: bool = True) -> None:
        """Restore the signal handlers.

        `wait`: for the pending reduction; not after a failure: other ranks may never join it.
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
