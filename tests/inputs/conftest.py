from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch.fork_server import Zygote
from tests.inputs.rule import Base, Inputs


@pytest.fixture(scope="session")
def base(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(zygote, tmp_path_factory.mktemp("inputs") / "base")


@pytest.fixture
def inputs(zygote: Zygote, base: Base, tmp_path: Path) -> Inputs:
    return Inputs(zygote, base, tmp_path)
