"""A page follows its sliders within 200 ms, counted in CPU time, as other load does not count."""

from __future__ import annotations

import pytest

from tests.studio.test_pages import BY_SLUG
from tools.proofs.benchmark_studio import LIMIT_S, costs

# These compute with the planner alone; the others train, round or tokenize at first.
PLANNED = ("memory", "plan", "checkpointing", "zero", "hybrid", "pipeline", "schedules", "sizes")


@pytest.mark.gate("pages")
@pytest.mark.parametrize("slug", PLANNED)
def test_an_update_takes_less_than_200_ms_of_cpu(slug: str) -> None:
    assert max(costs(BY_SLUG[slug])) < LIMIT_S
