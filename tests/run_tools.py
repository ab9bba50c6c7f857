"""Tools, run as a user runs them, and code in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

from tests.two_ranks import REPOSITORY, environment


def run_tool(name: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`python tools/NAME.py arguments`, which must end with `code`."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / f"{name}.py", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def printed(code: str, *arguments: str) -> str:
    """Return the output of `python -c code arguments`, which must end with 0."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
