"""Exit codes, and the exceptions that end a run on purpose."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

_MOST_CHARACTERS = 2_000
"""Longest printed problem."""
_MOST_OF_A_VALUE = 300


class ExitCode(IntEnum):
    """Exit codes of the process. Batch scripts use them to decide whether to requeue.

    Read the code from `status.json` in the run folder: torchrun and accelerate always return 1.
    """

    DONE = 0
    BAD_CONFIG = 2
    DOES_NOT_FIT = 3
    """Of a dry run, an estimate or a plan of a cluster: the machines lack room for the run."""
    CANNOT_SAVE = 74
    STOPPED = 75
    DIVERGED = 76
    NO_CHECKPOINT = 77
    HANG = 78
    OVER_BUDGET = 79


class ConfigError(ValueError):
    """An invalid config, with all its problems, not just the first.

    Each problem is one sentence with the wrong value, its origin and the key to change. `str()` is
    the report to print.
    """

    code = ExitCode.BAD_CONFIG

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        report = [_readable(problem) for problem in self.problems]
        if len(report) > 1:
            numbered = [f"  {n}. {problem}" for n, problem in enumerate(report, 1)]
            report = [f"{len(report)} problems:", *numbered]
        super().__init__("\n".join(report))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Pickle the list of problems: unpickling the report alone would give a single problem."""
        return type(self), (self.problems,)


class JoinRefused(ConfigError):
    """A problem that ranks find while they join, so that none waits for the others."""


def _readable(problem: str) -> str:
    """Return a problem, with the middle elided if it is too long to print."""
    if len(problem) <= _MOST_CHARACTERS:
        return problem
    half = _MOST_CHARACTERS // 2
    return f"{problem[:half]} ... {problem[-half:]}"


def shortened(value: object) -> str:
    """Return the repr of a value, with the middle elided if it is long."""
    text = repr(value)
    if len(text) <= _MOST_OF_A_VALUE:
        return text
    return f"{text[: _MOST_OF_A_VALUE // 2]}...{text[-_MOST_OF_A_VALUE // 4 :]}"


_CONTINUES = ("and ", "but ", "from ", "over ", "which ", "whose ")


def worded(key: str, value: object, origin: str, why: str, use: str = "") -> str:
    """Return a problem as a sentence: the key, its value and origin, the reason, the replacement.

    `why` continues the sentence (", but ...", ", which ...") or follows a colon.
    """
    joint, stop = (", ", ": ") if why.startswith(_CONTINUES) else (": ", "; ")
    instead = f"{stop}{use}" if use else ""
    return f"{key} is {shortened(value)} ({origin}){joint}{why}{instead}"


class Problems:
    """Collects all problems of the user's configs and raises them together."""

    def __init__(self, look_up: Callable[[str], tuple[object, str]]) -> None:
        """`look_up` returns the value of a dotted key and its origin."""
        self._look_up = look_up
        self._sentences: list[str] = []

    def add(self, key: str, why: str, use: str = "") -> None:
        """Add a problem about a key; the sentence includes its value."""
        self.say(self.worded(key, why, use))

    def worded(self, key: str, why: str, use: str = "") -> str:
        """Return a problem about a key as a sentence that includes its value."""
        return worded(key, *self._look_up(key), why, use)

    def say(self, *sentences: str) -> None:
        """Add problems that are complete sentences or do not concern a single value."""
        self._sentences += sentences

    def __iter__(self) -> Iterator[str]:
        return iter(self._sentences)

    def __len__(self) -> int:
        return len(self._sentences)


class NoCheckpoint(ConfigError):
    """Checkpoints exist, but none is usable. Starting over would silently discard them."""

    code = ExitCode.NO_CHECKPOINT


class NoRoom(ConfigError):
    """A valid config whose folder is on a full or read-only disk; exits like any failed write."""

    code = ExitCode.CANNOT_SAVE


class Unusable(ValueError):
    """An unusable file or checkpoint; the message names the file and the problem."""


class RunStopped(Exception):
    """Ends the loop with an exit code other than DONE (signal, divergence, full disk)."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class CannotSave(Exception):
    """A run file could not be written: the disk is full, read-only or gone."""

    code = ExitCode.CANNOT_SAVE


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_FULL_TEXTS = (*(os.strerror(n) for n in _FULL), *(f"(os error {n})" for n in _FULL))


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if an exception or one of its causes reports a full or read-only disk.

    The message is checked too: shutil and native libraries raise errors without errno.
    """
    while error is not None:
        if isinstance(error, CannotSave) or any(text in str(error) for text in _FULL_TEXTS):
            return True
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False
