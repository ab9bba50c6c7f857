"""Evaluations and saves beside a run's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.estimate.host import checkpoint_bytes
from harness.estimate.step_time.job import Beside, Job, forward_seconds
from harness.estimate.step_time.step import estimate_time
from tests.estimate.step_time.test_step import MACHINE, run, timed


def test_a_forward_pass_is_about_a_third_of_a_micro_batch() -> None:
    step = timed()
    assert 0.2 < forward_seconds(step) * step.inputs.grad_accum / step.seconds < 0.4


def test_evaluations_are_as_many_and_as_long_as_the_run_config_says() -> None:
    step = timed()  # micro-batch 4 on 8 ranks
    few, many = (Beside.of(step, 1000, (50, samples), 0) for samples in (32, 320))
    assert few.evaluations == 20
    assert few.evaluating == pytest.approx(20 * forward_seconds(step))
    assert many.evaluating == pytest.approx(10 * few.evaluating)
    assert Beside.of(step, 1000, (0, 96), 0).seconds == 0


def test_a_save_waits_for_its_bytes_and_a_background_save_for_the_host() -> None:
    step = timed()
    one = Beside.of(step, 1000, (0, 96), 100, disk_gb_per_s=2.0)
    assert one.saves == 10
    assert one.save_bytes == checkpoint_bytes(step.inputs)
    assert one.save_seconds == pytest.approx(one.save_bytes / 2e9)
    there = estimate_time(replace(run(), saves_in_background=True), MACHINE)
    assert Beside.of(there, 1000, (0, 96), 100).save_seconds < 0.1 * one.save_seconds


def test_a_job_saves_as_often_as_asked() -> None:
    best, asked = (Job(1e6, 1024, 700, 60, saves=saves) for saves in (0, 1000))
    assert asked.save_every_seconds == 1000
    assert asked.days_with_failures > best.days_with_failures
