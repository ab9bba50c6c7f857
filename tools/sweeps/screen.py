"""Lines of a sweep that stay, and on a terminal one line that changes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from harness import terminal
from tools.sweeps.text import shown


class Progress(Protocol):
    """The line of a trial that runs."""

    step: int
    value: float

    @property
    def number(self) -> int:
        """Its number."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of its whole run."""
        ...


class Screen:
    """Standard output."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._line = ""

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._replace("")
        terminal.say(text)

    def show(self, running: Iterable[Progress]) -> None:
        """Replace the line that changes: each trial's step and metric."""
        self._replace(
            " | ".join(
                f"{of.number:03} step {of.step}/{of.total_steps} {shown(of.value)}"
                for of in running
            )
        )

    def _replace(self, line: str) -> None:
        if not self._is_terminal or line == self._line:
            return
        width = (terminal.columns(sys.stdout) or terminal.COLUMNS) - 1
        print(f"\r{line[:width]:<{min(width, len(self._line))}}", end="", flush=True)
        if not line:
            print("\r", end="", flush=True)
        self._line = line
