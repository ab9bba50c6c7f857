"""The first failure of any rank, told to all of them: they end with its code, and at once.

Without it they would wait for that rank in a collective until something loses patience, and would
then report that. It goes through the store at which the ranks met: that is there before a run
folder is, and needs no disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

_RANKS_PER_S = 64  # that ask the store: no more, however many there are
_STORE_S = 5.0  # a store that takes longer to answer is that of a stopped or lost rank 0
_FIRST, _ENDING = "alarm/first", "alarm/ending"


@dataclass(frozen=True)
class Failure:
    """Ends all ranks: which one failed, the exit code of all, and why."""

    rank: int
    code: int
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.message}"


class Alarm(threading.Thread):
    """Listens for another rank's failure, and tells of this one's.

    Only this thread asks the store: an answer may never come, and the thread that trains waits for
    it no longer than a few seconds. `store`: a connection of its own; None without other ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(name="alarm", daemon=True)
        self.store, self.rank, self.world_size = store, rank, world_size
        self.tick_s = float(math.ceil(world_size / _RANKS_PER_S))
        self.on_end: Callable[[Failure], None] = lambda _: None
        """Comes on every rank before it ends."""
        self.first: Failure | None = None
        """The first failure of any rank, as far as this one knows."""
        self._mine: Failure | None = None
        self._closed = False
        self._wake, self._answered, self._all_end = (threading.Event() for _ in range(3))
        self._ends = threading.Lock()  # taken once, by the thread that ends this process

    def close(self) -> None:
        """Listen no more: from here on this rank needs no other one."""
        self._closed = True
        self._wake.set()
        if self.is_alive():
            self.join(_STORE_S)

    def end(self, failure: Failure, report: Callable[[Failure], None]) -> NoReturn:
        """End this process, and the other ranks, with the first failure of any.

        `failure`: this rank's; `report` tells the console about it, given the first one so far.
        """
        if self._ends.acquire(blocking=False):
            with contextlib.suppress(OSError):  # a terminal that is closed
                report(self.first or failure)  # before anything that may wait
            self._mine = failure
            self._wake.set()
            if self.is_alive():
                self._answered.wait(_STORE_S)
            first = self.first or failure
            self._record(first)
            if self.is_alive() and self._ends_last(first):
                self._all_end.wait(self._patience_s)
            exit_now(first.code)
        threading.Event().wait()  # the other thread ends this process within seconds
        raise AssertionError("unreachable")

    def run(self) -> None:
        """Ask at every tick, until closed."""
        # The store goes with rank 0. What that means is for the watchdog or the launcher to say.
        with contextlib.suppress(RuntimeError):
            while self.first is None and not self._closed:
                self._wake.wait(self.tick_s)
                self.first = self._ask()
        self._answered.set()
        if self.first is None:
            return
        ends_here = self._ends.acquire(blocking=False)
        if ends_here:
            with contextlib.suppress(OSError):
                print(f"rank {self.rank} ends: {self.first}", file=sys.stderr, flush=True)
            self._record(self.first)
        with contextlib.suppress(RuntimeError):
            self._wait_for_others(self.first)
        self._all_end.set()
        if ends_here:
            exit_now(self.first.code)

    def _ask(self) -> Failure | None:
        text = b""
        if self._mine is not None:
            text = self.store.compare_set(_FIRST, "", json.dumps(asdict(self._mine)))
        elif self.store.check([_FIRST]):
            text = self.store.get(_FIRST)
        return Failure(**json.loads(text)) if text else None

    def _wait_for_others(self, first: Failure) -> None:
        end, failed = time.monotonic() + self._patience_s, self.rank == first.rank
        if not failed:
            self.store.add(_ENDING, 1)
        enough = self.world_size - 1 if failed else self.world_size
        while self._ends_last(first) and time.monotonic() < end:
            if self.store.add(_ENDING, 0) >= enough:
                break
            time.sleep(0.05)
        if failed:  # the last word of any rank to rank 0, whose process may hold the store
            self.store.add(_ENDING, 1)

    def _ends_last(self, first: Failure) -> bool:
        """True on the rank that failed: once it has ended, a launcher ends the others with a code
        of its own. And on rank 0, after that one, for the store.
        """
        return self.rank in (0, first.rank)

    @property
    def _patience_s(self) -> float:
        return 2 * self.tick_s + _STORE_S

    def _record(self, failure: Failure) -> None:
        try:
            self.on_end(failure)
        except Exception as error:  # must not hide what ends the run, nor keep it
            with contextlib.suppress(OSError):
                print(f"rank {self.rank} could not record it: {error}", file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """End this process with what it has printed: no thread, hook or connection keeps it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
