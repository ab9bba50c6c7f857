"""Whole jobs: evaluations, saves and their best interval, failures, and a site's rates."""

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from harness.estimate.host import checkpoint_bytes
from harness.estimate.inputs import Inputs
from harness.estimate.step_time.calibration import Measured, Site, calibrated
from harness.estimate.step_time.job import (
    DAY,
    MTBF_GPU_HOURS,
    EvalAndSaveTime,
    Job,
    forward_seconds,
)
from harness.estimate.step_time.machine import cpu_machine, machine_of, refined
from harness.estimate.step_time.step import estimate_time
from harness.plan.duration import read_site
from tests.estimate.runs import run_of
from tests.estimate.step_time.test_step import MACHINE, run, timed


def test_evaluation_time_follows_the_run_config() -> None:
    step = timed()  # micro-batch 4 on 8 ranks
    assert 0.2 < forward_seconds(step) * step.inputs.grad_accum / step.seconds < 0.4
    few, many = (EvalAndSaveTime.of(step, 1000, (50, samples, 1), 0) for samples in (20, 300))
    assert few.evaluations == 20
    assert few.evaluating == pytest.approx(20 * forward_seconds(step))
    assert many.evaluating == pytest.approx(10 * few.evaluating)
    sets = EvalAndSaveTime.of(step, 1000, (50, 32, 3), 0)
    assert sets.evaluating == pytest.approx(3 * few.evaluating)
    assert EvalAndSaveTime.of(step, 1000, (0, 96, 1), 0).evaluating == 0


def test_save_time_is_bytes_or_host_copy_in_background() -> None:
    step = timed()
    one = EvalAndSaveTime.of(step, 1000, (0, 96, 1), 100, disk_gb_per_s=2.0)
    assert one.saves == 10
    assert one.save_bytes == checkpoint_bytes(step.inputs)
    assert one.save_seconds == pytest.approx(one.save_bytes / 2e9)
    there = estimate_time(replace(run(), saves_in_background=True), MACHINE)
    assert EvalAndSaveTime.of(there, 1000, (0, 96, 1), 100).save_seconds < 0.1 * one.save_seconds


def test_job_estimate_counts_saves_hours_and_energy() -> None:
    best, asked = (Job(1e6, 1024, 700, 60, saves=saves) for saves in (0, 1000))
    assert asked.save_every_seconds == 1000
    assert asked.days_with_failures > best.days_with_failures
    assert Job(1e6, 10**6, 700, saves=1).days_with_failures > 0  # it fails faster than it proceeds
    job = Job(seconds=10 * 3600, gpus=8, watts=500)
    assert (job.gpu_hours, job.energy_kwh) == (80, 40)
    assert 160 < job.cost(2.0) < 170  # saves and failures are minor for eight GPUs


def test_optimal_save_interval_at_llama_3_failure_rate() -> None:
    """419 unexpected failures in 54 days (arXiv 2407.21783)."""
    job = Job(seconds=54 * DAY, gpus=16_384, watts=700)
    assert job.seconds / job.failure_seconds == pytest.approx(419, rel=0.02)

    def lost(every: float) -> float:
        return job.save_seconds / every + every / 2 / job.failure_seconds

    best = job.save_every_seconds
    assert best == pytest.approx(sqrt(2 * 60 * MTBF_GPU_HOURS * 3600 / 16_384))
    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    assert job.days_with_failures == pytest.approx(63.62, abs=0.01)  # of 54


FACTORS = {"products": 0.6, "memory_rate": 1.7, "launch_scale": 2.5, "link_latency": 3.0}


def inputs(ranks: int, stage: int, micro_batch: int, seq_len: int) -> Inputs:
    keys = {"stage": stage, "micro_batch": micro_batch, "seq_len": seq_len, "grad_accum": 2}
    return run_of("tiny", "fp32", ranks, accelerator="cpu", gpus_per_node=ranks, **keys)


def runs(site: dict[str, float], disturbed: int = 0) -> list[Measured]:
    """Return steps of a machine that differs from the guessed one by `site`."""
    made = []
    for ranks in (1, 2, 4):
        machine = refined(cpu_machine(ranks, 2), site)
        for stage, micro_batch, seq_len in ((0, 1, 64), (1, 4, 64), (2, 2, 256), (3, 8, 128)):
            run = inputs(ranks, stage, micro_batch, seq_len)
            made.append(Measured(run, estimate_time(run, machine).seconds))
    return [replace(run, seconds=3 * run.seconds) for run in made[:disturbed]] + made[disturbed:]


def test_site_factors_are_recovered_from_step_times() -> None:
    site = calibrated(runs(FACTORS), 2)
    assert site.median_error < 0.03
    other = inputs(2, 3, 4, 512)
    real = estimate_time(other, refined(cpu_machine(2, 2), FACTORS)).seconds
    guessed = estimate_time(other, cpu_machine(2, 2)).seconds
    assert estimate_time(other, site.machine(None, 2)).seconds == pytest.approx(real, rel=0.1)
    assert abs(guessed / real - 1) > 0.2


@pytest.mark.gate("memory")
def test_steps_that_were_disturbed_do_not_decide() -> None:
    measured = runs(FACTORS, disturbed=3)
    site = calibrated(measured, 2)
    for row in measured[3:]:
        machine = site.machine(None, row.inputs.gpus_per_node)
        assert estimate_time(row.inputs, machine).seconds == pytest.approx(row.seconds, rel=0.1)


def test_site_fit_keeps_listed_rates_of_a_normal_machine() -> None:
    site = calibrated(runs({}), 2)
    assert site.factors == {}
    assert site.median_error == 0


def test_a_site_is_read_as_it_was_written(tmp_path: Path) -> None:
    site = Site(None, "fp32", 2, {"products": 0.5}, 4, 0.1)
    site.write(tmp_path / "site.json")
    assert read_site(tmp_path / "site.json") == site
    machine = site.machine(None, 4)
    assert (machine.gpus_per_node, machine.evidence) == (4, "measured")


def test_rates_are_those_of_one_gpu_in_one_precision() -> None:
    site = Site("a100-80", "bf16", 0, {"products": 0.5}, 4, 0.1)
    assert site.problem("a100-80", "bf16") is None
    for other in (("h100-sxm", "bf16"), ("a100-80", "fp32"), (None, "fp32")):
        assert "measured on a100-80 in bf16, but this is" in str(site.problem(*other))


def test_site_fit_skips_rates_a_machine_lacks() -> None:
    machine = machine_of("a100-80", 1, "bf16")
    assert machine.step_seconds == 0
    run = replace(inputs(1, 0, 2, 64), accelerator="cuda", gpu="a100-80", precision="bf16")
    seconds = 2 * estimate_time(run, machine).seconds
    site = calibrated([Measured(run, seconds)] * 3, 0)
    assert (site.gpu, site.precision) == ("a100-80", "bf16")
    assert site.factors
    assert "step_seconds" not in site.factors


@pytest.mark.parametrize("text", ["", "{}", '{"site": 3}', '{"site": {"factors": {}}}'])
def test_other_files_and_factors_of_what_is_no_rate_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "site.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no rates of measured runs"):
        read_site(path)
    with pytest.raises(ValueError, match="is not a regular file"):  # without end
        read_site(Path("/dev/zero"))
    Site(None, "fp32", 2, {"watts": 2.0}, 1, 0.0).write(path)
    with pytest.raises(ValueError, match="watts"):
        read_site(path)
