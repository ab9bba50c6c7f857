"""Whole jobs: the best interval between saves, and what failures add."""

from __future__ import annotations

from math import sqrt

import pytest

from harness.estimate.step_time.job import DAY, MTBF_GPU_HOURS, Job

LLAMA_3 = Job(seconds=54 * DAY, gpus=16_384, watts=700)


def test_failures_are_as_frequent_as_those_of_llama_3() -> None:
    """419 unexpected ones in 54 days (arXiv 2407.21783)."""
    assert LLAMA_3.seconds / LLAMA_3.failure_seconds == pytest.approx(419, rel=0.02)


def test_no_other_interval_loses_less() -> None:
    job = LLAMA_3

    def lost(every: float) -> float:
        return job.save_seconds / every + every / 2 / job.failure_seconds

    best = job.save_every_seconds
    assert best == pytest.approx(sqrt(2 * 60 * MTBF_GPU_HOURS * 3600 / 16_384))
    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_hours_energy_and_cost() -> None:
    job = Job(seconds=10 * 3600, gpus=8, watts=500)
    assert (job.gpu_hours, job.energy_kwh) == (80, 40)
    assert 160 < job.cost(2.0) < 170  # saves and failures are little for eight GPUs
