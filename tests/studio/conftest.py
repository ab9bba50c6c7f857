"""Serves a studio, started as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real_runs import REPOSITORY, environment
from tools.studio_app.runs import read_runs_of


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
def serving(runs: Path, *arguments: str) -> Iterator[Studio]:
    """Run `python tools/studio.py --port 0 arguments` in a new folder; end it afterwards."""
    command = [sys.executable, REPOSITORY / "tools/studio.py", "--cold"]
    command += ["--port", "0", "--runs", runs]
    errors = runs.parent / "said.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*map(str, command), *arguments],
            cwd=runs.parent,
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


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    """Yield a studio on 127.0.0.1 for all tests; its folder of runs is empty at first."""
    pytest.importorskip("nicegui", reason="needs NiceGUI: pip install 'decoder-harness[studio]'")
    runs = tmp_path_factory.mktemp("studio") / "runs"
    runs.mkdir()
    with serving(runs) as running:
        yield running


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty folder whose runs this process's studio reads."""
    root = tmp_path / "runs"
    root.mkdir()
    read_runs_of(root)
    yield root
    read_runs_of(Path("runs"))
