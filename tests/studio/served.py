"""A studio in a process of its own, started as a user starts it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.real_runs import REPOSITORY, environment


@dataclass(frozen=True)
class Studio:
    """A running studio. `address` ends with a slash, or with its token."""

    address: str
    runs: Path
    errors: Path
    """Its terminal output, except its address."""

    @property
    def said(self) -> str:
        return self.errors.read_text()

    @property
    def port(self) -> int:
        return int(re.findall(r":(\d+)/", self.address)[0])


@contextmanager
def serving(runs: Path, *arguments: str, folder: Path | None = None) -> Iterator[Studio]:
    """Run the studio on a free port in a folder, by default that of `runs`; end it afterwards."""
    folder = folder or runs.parent
    command = [sys.executable, REPOSITORY / "tools/studio.py", "--cold"]
    command += ["--port", "0", "--runs", runs]
    errors = folder / "said.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*map(str, command), *arguments],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"studio: (http://\S+)\n", line)
        assert address, f"{line!r}, exit code {process.poll()}"
        yield Studio(address[1], runs, errors)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
