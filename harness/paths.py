"""Paths that users write."""

from __future__ import annotations

from pathlib import Path

from harness.errors import ConfigError


def user_path(key: str, text: str) -> Path:
    """The path that `key` names, with ~ and ~user expanded; ConfigError where it cannot be one."""
    if "\0" in text:
        raise ConfigError(f"{key} is {text!r}: no path holds a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise ConfigError(f"{key} is {text}: this machine knows no home of {user}") from None
