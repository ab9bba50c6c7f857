"""Records signals that ask this process to stop. Standard library only: loaded first of all."""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from harness.errors import ExitCode

# Ctrl-C; a batch system's end and its early warning; a closed terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_IMPATIENT = (signal.SIGINT, signal.SIGTERM)
_JOINING_S = 10.0  # time for ranks that are asked to stop while joining to agree on it


class StopAsked(BaseException):
    """Interrupts interruptible work after a stop request."""


class StopRequest:
    """A request to stop this process, by a signal or by `ask`; `received` names it.

    During start-up, a second Ctrl-C or SIGTERM ends the process at once, as does the first if the
    other ranks do not join. During training, a second signal has no effect.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.began = time.monotonic()
        """When this process started, for limits that count from there."""
        self.give_up: Callable[[], object] = lambda: os._exit(ExitCode.STOPPED)
        """Ends this process at once, and the other ranks if they have joined."""
        self._breaks_off = False
        self._starting = True
        self._joins = False
        # A process that ignores SIGHUP is meant to outlive its terminal (nohup).
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [n for n in STOP_SIGNALS if not (ignored and n == signal.SIGHUP)]
        # Python runs handlers only between its instructions, and a rank that waits for others
        # executes none. The signal numbers are written to this pipe at once.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._wakes_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        threading.Thread(target=self._watch, name="stop request", daemon=True).start()

    def close(self) -> None:
        """Restore the signal handlers. A second call has no effect."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakes_before)
            os.close(self._write_end)  # ends the thread
        self._before = {}

    def ask(self, reason: str) -> None:
        """Request a stop like a signal; the first reason is kept."""
        self.received = self.received or reason

    def trains(self) -> None:
        """Record that training begins: a request now leads to a save, once."""
        self._starting = False

    @contextlib.contextmanager
    def breaks_off(self) -> Iterator[None]:
        """Return a context in which a stop request, even an earlier one, raises StopAsked."""
        self._breaks_off = True
        try:
            if self.received is not None:
                raise StopAsked
            yield
        finally:
            self._breaks_off = False

    @contextlib.contextmanager
    def joins(self) -> Iterator[None]:
        """Return a context in which this rank waits for others, which may have ended."""
        self._joins = True
        try:
            yield
        finally:
            self._joins = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if self._breaks_off:
            self._breaks_off = False
            raise StopAsked

    def _watch(self) -> None:
        impatience, since = 0, math.inf
        while True:
            wait_s = None if since == math.inf or not self._starting else 1.0
            if select.select([self._read_end], [], [], wait_s)[0]:
                numbers = os.read(self._read_end, 64)
                if not numbers:
                    break  # closed
                if more := sum(numbers.count(number) for number in _IMPATIENT):
                    impatience, since = impatience + more, time.monotonic()
            late = self._joins and time.monotonic() - since > _JOINING_S
            if self._starting and (impatience > 1 or late):
                self.give_up()
        os.close(self._read_end)
