from __future__ import annotations

import pytest

from tests.plan.plans import Planner


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("models"))
