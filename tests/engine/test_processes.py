"""Joining the process group."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from harness.engine import processes


def test_the_ninja_beside_the_interpreter_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    processes._find_own_ninja()
    assert shutil.which("ninja") == str(Path(sys.executable).with_name("ninja"))
