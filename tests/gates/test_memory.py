"""Predicted model states against the live tensors of the real engine on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gates.memory.cases import all_cases, covering_cases

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_covering_set_covers():
    chosen, every = covering_cases(), all_cases()
    assert set(chosen) <= set(every)
    for field in ("layout", "precision", "accumulation"):
        assert {getattr(case, field) for case in chosen} == {getattr(c, field) for c in every}


@pytest.mark.gate("memory")
def test_live_tensors_of_real_runs_are_what_was_predicted(tmp_path):
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests/gates/measure_memory.py", f"--out={tmp_path}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saved = [c for c in covering_cases() if c.counts_saved and not c.layout.endswith("zero3")]
    # Three points on every rank, and what is saved.
    counts = sum(3 * case.ranks for case in covering_cases()) + sum(case.ranks for case in saved)
    assert done.stdout.splitlines()[-1] == f"{counts} counts, 0 off by more than 1%"
