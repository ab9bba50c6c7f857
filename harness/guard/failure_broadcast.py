"""Broadcasts the first failure of any rank: all ranks end at once with its exit code.

Otherwise they would wait for that rank in a collective until a timeout, and report the timeout. The
failure is sent through the rendezvous store, which exists before the run folder and needs no disk.
"""

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

_RANKS_PER_S = 64  # upper limit of requests to the store
_STORE_S = 5.0  # a store that takes longer means that rank 0 is stopped or lost
_FIRST, _ENDING = "alarm/first", "alarm/ending"


@dataclass(frozen=True)
class Failure:
    """The failure that ends all ranks: the rank that failed, the exit code and the reason."""

    rank: int
    code: int
    message: str
    place: str = ""
    """Position of the rank in the layout, from Grid.described."""
    noticed_by: int | None = None
    """The rank that lost its connection to the one that failed; None if that one reported it."""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.place} failed: {self.message}"


class FailureBroadcast(threading.Thread):
    """Listens for failures of other ranks, and publishes this rank's.

    Only this thread queries the store, because a reply may never come; the training thread waits
    for this thread for a few seconds at most. `store`: a separate connection; None if there are no
    other ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(name="alarm", daemon=True)
        self.store, self.rank, self.world_size = store, rank, world_size
        self.tick_s = float(math.ceil(world_size / _RANKS_PER_S))
        self.on_end: Callable[[Failure], None] = lambda _: None
        """Called on every rank before it ends."""
        self.gone: Callable[[], list[dict[str, Any]]] = list
        """Returns the last heartbeats of ranks whose processes have ended."""
        self.place = ""
        """Position of this rank in the layout, from Grid.described."""
        self.first: Failure | None = None
        """The first failure of any rank, once this rank has read it."""
        self._mine: Failure | None = None
        self._closed = False
        self._wake, self._answered, self._all_end = (threading.Event() for _ in range(3))
        self._ends = threading.Lock()  # acquired once, by the thread that ends this process

    def close(self) -> None:
        """Stop listening: this rank no longer depends on others."""
        self._closed = True
        self._wake.set()
        if self.is_alive():
            self.join(_STORE_S)

    def lost(self, failure: Failure) -> Failure:
        """Return the failure to report for a lost connection: the end of a process that could not
        report it, or `failure` itself, which `end` replaces if another rank failed first.
        """
        self._wake.wait(2 * self.tick_s)  # a rank that fails reports before it ends
        if self.first is not None:
            return failure
        for beat in self.gone():
            message = (
                f"its process {beat['pid']} on {beat['host']} was killed, perhaps because memory "
                f"ran out (see dmesg); rank {self.rank} lost the connection: {failure.message}"
            )
            return Failure(beat["rank"], failure.code, message, beat["place"], self.rank)
        return failure

    def end(self, failure: Failure, report: Callable[[Failure], None]) -> NoReturn:
        """End this process, and the other ranks, with the first failure of any rank.

        `failure`: this rank's; `report` prints the first failure known so far.
        """
        if self._ends.acquire(blocking=False):
            with contextlib.suppress(OSError):  # a closed terminal
                report(self.first or failure)  # before anything that may block
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
        """Query the store at every tick, until closed."""
        # The store ends with rank 0; the watchdog or the launcher reports that.
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
                print(
                    f"rank {self.rank}{self.place} ends: {self.first}", file=sys.stderr, flush=True
                )
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
        if failed:  # last message to rank 0, whose process may host the store
            self.store.add(_ENDING, 1)

    def _ends_last(self, first: Failure) -> bool:
        """Return True on the failed rank, whose code launchers report, and the store's host."""
        return self.rank in (0, first.rank)

    @property
    def _patience_s(self) -> float:
        return 2 * self.tick_s + _STORE_S

    def _record(self, failure: Failure) -> None:
        try:
            self.on_end(failure)
        except Exception as error:  # must neither hide the failure nor delay the end
            with contextlib.suppress(OSError):
                text = f"rank {self.rank} could not record the failure: {error}"
                print(text, file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """Flush the output and end this process; no thread, hook or connection delays it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
