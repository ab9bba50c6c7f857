"""A studio for all tests, and the runs that this process's studio reads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.studio.served import Studio, serving
from tools.studio_app.runs import read_runs_of


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    """Yield a studio on 127.0.0.1 for all tests; its folder of runs is empty at first."""
    pytest.importorskip("nicegui", reason="needs NiceGUI: pip install 'decoder-harness[studio]'")
    runs = tmp_path_factory.mktemp("studio") / "runs"
    runs.mkdir()
    with serving(runs) as running:
        yield running


@pytest.fixture(autouse=True)
def runs(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty folder whose runs this process's studio reads, not those of the checkout."""
    root = tmp_path / "runs"
    root.mkdir()
    read_runs_of(root)
    yield root
    read_runs_of(Path("runs"))
