"""A process that another one forked, and that is asked for and signalled like one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

_POLL_S = 0.02


class Forked:
    """As much of subprocess.Popen as a group of ranks needs."""

    def __init__(self, pid: int, code_of: Callable[[int], int | None]) -> None:
        """`code_of`: returns a process's exit code, once, when it has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._code_of = code_of

    def poll(self) -> int | None:
        """Return the exit code, a signal's as a negative number; None while it runs."""
        if self.returncode is None:
            self.returncode = self._code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)
