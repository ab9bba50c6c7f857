"""Exit codes, and the exceptions that end a run on purpose."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

_MOST_CHARACTERS = 2_000
"""Of a problem as it is printed."""
_MOST_OF_A_VALUE = 300


class ExitCode(IntEnum):
    """What the process returns; batch scripts decide from it whether to requeue.

    `status.json` in the run folder is the truth: torchrun and accelerate turn every code into 1.
    """

    DONE = 0
    BAD_CONFIG = 2
    CANNOT_SAVE = 74
    STOPPED = 75
    DIVERGED = 76
    NO_CHECKPOINT = 77
    HANG = 78


class ConfigError(ValueError):
    """What the user wrote cannot run; carries every problem found, not just the first.

    Each problem is one sentence that names the wrong value, where it came from and the key to
    change. `str()` is the report to print.
    """

    code = ExitCode.BAD_CONFIG

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__(self._report())

    def _report(self) -> str:
        if len(self.problems) == 1:
            return _readable(self.problems[0])
        numbered = [f"  {n}. {_readable(problem)}" for n, problem in enumerate(self.problems, 1)]
        return "\n".join([f"{len(self.problems)} problems:", *numbered])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Pickle by the problems: the report alone would come back as one problem."""
        return type(self), (self.problems,)


def _readable(problem: str) -> str:
    """A problem without the middle of a value that fills the screen."""
    if len(problem) <= _MOST_CHARACTERS:
        return problem
    half = _MOST_CHARACTERS // 2
    return f"{problem[:half]} ... {problem[-half:]}"


def shortened(value: object) -> str:
    """Return a value as Python writes it, without the middle of a long one."""
    text = repr(value)
    if len(text) <= _MOST_OF_A_VALUE:
        return text
    return f"{text[: _MOST_OF_A_VALUE // 2]}...{text[-_MOST_OF_A_VALUE // 4 :]}"


_CONTINUES = ("and ", "but ", "from ", "over ", "which ", "whose ")


def worded(key: str, value: object, origin: str, why: str, use: str = "") -> str:
    """Return a problem as a sentence: the key, its value, where that came from, why it is wrong,
    and what to use instead.

    `why` continues the sentence (", but ...", ", which ...") or stands behind a colon.
    """
    goes_on = why.startswith(_CONTINUES)
    stop = ": " if goes_on else "; "
    instead = f"{stop}{use}" if use else ""
    return f"{key} is {shortened(value)} ({origin}){', ' if goes_on else ': '}{why}{instead}"


class Problems:
    """Everything that is wrong with what the user wrote, gathered to be raised at once."""

    def __init__(self, look_up: Callable[[str], tuple[object, str]]) -> None:
        """`look_up`: the value of a dotted key, and where it came from."""
        self._look_up = look_up
        self._sentences: list[str] = []

    def add(self, key: str, why: str, use: str = "") -> None:
        """Add a problem with the value of a key."""
        self.say(self.worded(key, why, use))

    def worded(self, key: str, why: str, use: str = "") -> str:
        """Return a problem with the value of a key as a sentence."""
        return worded(key, *self._look_up(key), why, use)

    def say(self, *sentences: str) -> None:
        """Add problems that are sentences already, or that no single value is to blame for."""
        self._sentences += sentences

    def __iter__(self) -> Iterator[str]:
        return iter(self._sentences)

    def __len__(self) -> int:
        return len(self._sentences)

    def raise_any(self) -> None:
        """Raise one ConfigError with all problems, if there are any."""
        if self._sentences:
            raise ConfigError(self._sentences)


class NoCheckpoint(ConfigError):
    """There are checkpoints, but none can be used: starting over would lose them silently."""

    code = ExitCode.NO_CHECKPOINT


class NoRoom(ConfigError):
    """Nothing is wrong with what the user wrote, but its place is on a disk that is full or
    read-only: code 74, as for everything else that cannot be saved.
    """

    code = ExitCode.CANNOT_SAVE


class Unusable(ValueError):
    """A file or checkpoint that cannot be used; the message names what is wrong with which file."""


class RunStopped(Exception):
    """Ends the loop with an exit code other than DONE (a signal, divergence, a full disk)."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class CannotSave(Exception):
    """Something of the run could not be written: its disk is full, read-only or gone."""

    code = ExitCode.CANNOT_SAVE


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_FULL_TEXTS = (*(os.strerror(n) for n in _FULL), *(f"(os error {n})" for n in _FULL))


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that a disk is full or read-only.

    By its text too: libraries in other languages, and shutil, raise classes without an errno.
    """
    while error is not None:
        if isinstance(error, CannotSave) or any(text in str(error) for text in _FULL_TEXTS):
            return True
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False
