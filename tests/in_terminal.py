"""Runs commands in a terminal of any width."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.real_runs import REPOSITORY, environment


class Terminal:
    """A command whose terminal output is read as it appears; Ctrl-C can be pressed."""

    def __init__(
        self,
        command: Sequence[object],
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> None:
        """Start it as a shell does, in a session that owns this terminal."""
        self._end, theirs = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env=environment(**{"TERM": "xterm", **(env or {})}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.text = ""

    def resize(self, columns: int) -> None:
        """Change the width of the terminal."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the foreground processes, as the terminal does."""
        os.write(self._end, b"\x03")

    def read(self, until: Callable[[str], bool], timeout_s: float = 900) -> None:
        """Read until a condition holds for the whole output, or the command has ended."""
        deadline = time.monotonic() + timeout_s
        while not until(self.text):
            assert time.monotonic() < deadline, self.text
            if not select.select([self._end], [], [], 1.0)[0]:
                continue
            try:
                read = os.read(self._end, 1 << 16)
            except OSError:  # the last process has closed the terminal
                break
            if not read:
                break
            self.text += read.decode(errors="replace").replace("\r\n", "\n")

    def ended(self) -> int:
        """Read the rest; return the exit code."""
        self.read(lambda text: False)
        return self.process.wait(60)

    def close(self) -> None:
        """End what is still running, and close the terminal."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._end)


def shown_in(
    command: Sequence[object], columns: int = 80, env: Mapping[str, str] | None = None
) -> str:
    """Return the text that a command writes to a terminal with `columns` columns."""
    terminal = Terminal(command, columns, env)
    try:
        terminal.ended()
        return terminal.text
    finally:
        terminal.close()
