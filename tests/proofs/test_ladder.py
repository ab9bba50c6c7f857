"""The ladder of memory: every rung is a plan, and none needs more than the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.estimate.units import GIB
from tools.proofs.ladder.rungs import RUNGS, STEP, Job, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    return tmp_path


def test_every_rung_needs_less_than_the_first(folder: Path) -> None:
    first, *others = [Job(name).estimated_bytes(folder) for name in RUNGS]
    assert max(others) < first


def test_the_longest_sample_fits_and_a_longer_one_does_not(folder: Path) -> None:
    job = Job("reversible").longest(GIB, folder)
    longer = Job(job.rung, job.tokens + STEP)
    assert job.estimated_bytes(folder) <= GIB < longer.estimated_bytes(folder)
