"""Tools, run as a user runs them, and code in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.two_ranks import REPOSITORY, environment, imported


def run_tool(name: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`python tools/NAME.py arguments`, which must end with `code`; forked from a process that has
    imported everything.
    """
    script, words = REPOSITORY / "tools" / f"{name}.py", [*map(str, arguments)]
    zygote, _ = imported()
    with tempfile.TemporaryDirectory() as logs:
        ended = zygote.script(script, words, REPOSITORY, Path(logs), environment())
        out, err = (Path(logs, stream).read_text() for stream in ("out", "err"))
    assert ended == code, out + err
    return subprocess.CompletedProcess([str(script), *words], ended, out, err)


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
