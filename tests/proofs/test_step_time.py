"""Timed layouts: those that rates are fitted to are others than those that judge them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.estimate.step_time.machine import cpu_machine, refined
from harness.estimate.step_time.step import estimate_time
from tools.cluster.calibrate import fitted
from tools.proofs import scaling
from tools.proofs.check_step_time import MEDIAN, TAU
from tools.proofs.step_times.cases import FITTED, JUDGED, Case
from tools.proofs.step_times.report import Timed, markdown, median_error, run_of, tau

FACTORS = {"products": 0.5, "launch_scale": 2.0, "memory_rate": 1.5}


def write_times(case: Case, out: Path) -> None:
    """Write the steps of a machine that is known, the first of them disturbed."""
    (out / "round0").mkdir(exist_ok=True)
    path = out / "round0" / f"{case.name}.json"
    path.write_text("[1.0]")
    machine = refined(cpu_machine(case.ranks, 2), FACTORS)
    seconds = estimate_time(run_of(case, out).inputs, machine).seconds
    path.write_text(json.dumps([3 * seconds, seconds, 2 * seconds]))


def test_no_layout_judges_the_rates_that_it_was_fitted_to() -> None:
    assert len(JUDGED) >= 24
    assert not {*FITTED} & {*JUDGED}
    assert len({case.name for case in (*FITTED, *JUDGED)}) == len(FITTED) + len(JUDGED)
    assert {case.ranks for case in JUDGED} == {1, 2, 4}
    assert all(case.ranks % (case.pipeline * case.tensor * case.sequence) == 0 for case in JUDGED)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Timed]:
    out = tmp_path_factory.mktemp("times")
    fit, judged = FITTED[::3], JUDGED[::4]
    for case in (*fit, *judged):
        write_times(case, out)
    site = fitted([run_of(case, out) for case in fit], 2)
    return [Timed(case, run_of(case, out), site) for case in judged]


def test_steps_of_a_known_machine_are_predicted_and_ranked(rows: list[Timed]) -> None:
    assert median_error(rows) <= MEDIAN
    assert tau(rows) >= TAU
    page = markdown(rows, rows[0].site)
    assert page.count("\n| ") == len(rows) + 1
    assert "zero3" in page


def test_scaling_divides_one_batch_or_gives_each_rank_as_much() -> None:
    strong, weak = (list(scaling.cases(kind, [1, 2, 4])) for kind in ("strong", "weak"))
    assert {case.ranks * case.accumulation for case in strong} == {8}
    assert {case.accumulation for case in weak} == {2}
