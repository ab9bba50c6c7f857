"""Runs that several tests inspect, each made once."""

import pytest

from harness.launch.fork_server import Zygote
from tests.run.features import Runs


@pytest.fixture(scope="session")
def runs(zygote: Zygote, data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(zygote, tmp_path_factory.mktemp("runs"), data)
