"""A site's rates come out of steps that were measured there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness.estimate.inputs import Inputs
from harness.estimate.step_time.calibration import Measured, Site, calibrated
from harness.estimate.step_time.machine import cpu_machine, machine_of, refined
from harness.estimate.step_time.step import estimate_time
from harness.estimate.zero_settings import ZeroSettings
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.plan.model_config import find_model_config
from tests.estimate.defaults import default_value

FACTORS = {"products": 0.6, "memory_rate": 1.7, "launch_scale": 2.5, "link_latency": 3.0}


def inputs(ranks: int, stage: int, micro_batch: int, seq_len: int) -> Inputs:
    zero = ZeroSettings.read(partial(default_value, type="AdamW", stage=stage))
    return Inputs(
        shape=Shape.from_hf(find_model_config("tiny")[0]),
        zero=zero,
        precision="fp32",
        grid=Grid(ranks),
        micro_batch=micro_batch,
        seq_len=seq_len,
        grad_accum=2,
        accelerator="cpu",
        gpus_per_node=ranks,
    )


def runs(site: dict[str, float], disturbed: int = 0) -> list[Measured]:
    """Return steps of a machine that differs from the guessed one by `site`."""
    made = []
    for ranks in (1, 2, 4):
        machine = refined(cpu_machine(ranks, 2), site)
        for stage, micro_batch, seq_len in ((0, 1, 64), (1, 4, 64), (2, 2, 256), (3, 8, 128)):
            run = inputs(ranks, stage, micro_batch, seq_len)
            made.append(Measured(run, estimate_time(run, machine).seconds))
    return [replace(run, seconds=3 * run.seconds) for run in made[:disturbed]] + made[disturbed:]


MACHINES = {ranks: cpu_machine(ranks, 2) for ranks in (1, 2, 4)}


def test_a_machine_is_known_again_from_its_steps() -> None:
    site = calibrated(runs(FACTORS), MACHINES, 2)
    assert site.median_error < 0.03
    other = inputs(2, 3, 4, 512)
    real = estimate_time(other, refined(MACHINES[2], FACTORS)).seconds
    guessed = estimate_time(other, MACHINES[2]).seconds
    assert estimate_time(other, site.machine(None, 2)).seconds == pytest.approx(real, rel=0.1)
    assert abs(guessed / real - 1) > 0.2


@pytest.mark.gate("memory")
def test_steps_that_were_disturbed_do_not_decide() -> None:
    measured = runs(FACTORS, disturbed=3)
    site = calibrated(measured, MACHINES, 2)
    for run in measured[3:]:
        machine = site.machine(None, run.inputs.gpus_per_node)
        assert estimate_time(run.inputs, machine).seconds == pytest.approx(run.seconds, rel=0.1)


def test_what_is_as_listed_stays_so() -> None:
    site = calibrated(runs({}), MACHINES, 2)
    assert site.factors == {}
    assert site.median_error == 0


def test_a_site_is_read_as_it_was_written(tmp_path: Path) -> None:
    site = Site(None, "fp32", 2, {"products": 0.5}, 4, 0.1)
    site.write(tmp_path / "site.json")
    assert Site.read(tmp_path / "site.json") == site
    assert site.machine(None, 2).evidence == "measured"


def test_rates_are_those_of_one_gpu_in_one_precision() -> None:
    site = Site("a100-80", "bf16", 0, {"products": 0.5}, 4, 0.1)
    assert site.problem("a100-80", "bf16") is None
    for other in (("h100-sxm", "bf16"), ("a100-80", "fp32"), (None, "fp32")):
        assert "measured on a100-80 in bf16, and this is" in str(site.problem(*other))


def test_numbers_that_a_machine_has_none_of_are_not_fitted() -> None:
    machine = machine_of("a100-80", 1, "bf16")
    assert machine.step_seconds == 0
    run = replace(inputs(1, 0, 2, 64), accelerator="cuda", gpu="a100-80", precision="bf16")
    seconds = 2 * estimate_time(run, machine).seconds
    site = calibrated([Measured(run, seconds)] * 3, {1: machine}, 0)
    assert (site.gpu, site.precision) == ("a100-80", "bf16")
    assert site.factors
    assert "step_seconds" not in site.factors


@pytest.mark.parametrize("text", ["", "{}", '{"site": 3}', '{"site": {"factors": {}}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.json").write_text(text)
    with pytest.raises(ValueError, match="no rates of a site"):
        Site.read(tmp_path / "site.json")


def test_factors_of_what_is_no_rate_are_refused(tmp_path: Path) -> None:
    Site(None, "fp32", 2, {"watts": 2.0}, 1, 0.0).write(tmp_path / "site.json")
    with pytest.raises(ValueError, match="watts"):
        Site.read(tmp_path / "site.json")
