"""Runs tools as a user does, and code in a new interpreter."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real_runs import REPOSITORY, environment, imported


def run_tool(
    name: str,
    *arguments: object,
    code: int = 0,
    cwd: Path = REPOSITORY,
    said: str = "",
    **variables: str | None,
) -> subprocess.CompletedProcess[str]:
    """Run `python tools/NAME.py arguments`, forked from a process that has imported everything; it
    must end with `code`. NAME may also be a module of tests/gates or of harness/models.

    `said` is its standard input; `variables` change its environment, None removes one.
    """
    rooms = ("tools", "tests/gates", "harness/models")
    script = next(path for room in rooms if (path := REPOSITORY / room / f"{name}.py").exists())
    words = [*map(str, arguments)]
    zygote, _ = imported()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        (logs / "in").write_text(said)
        tool = zygote.start(str(script), words, 1, cwd, logs, environment(**variables))
        (ended,) = tool.wait().codes
        out, err = (logs / "out").read_text(), (logs / "err").read_text()
    assert ended == code, out + err
    return subprocess.CompletedProcess([str(script), *words], ended, out, err)


def printed(code: str, *arguments: str, cwd: Path = REPOSITORY, **variables: str | None) -> str:
    """Return the output of `python -c code arguments`, which must end with 0; `variables` change
    its environment, None removes one.
    """
    env = environment(**{"PYTHONPATH": str(REPOSITORY), **variables})
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True)
    return done.stdout
