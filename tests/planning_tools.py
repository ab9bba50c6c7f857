"""Tools that plan and print, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_tool(name: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`python tools/NAME.py arguments`, which must end with `code`."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / f"{name}.py", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
