"""fp32 means fp32 unless the user overrides it, and the run reports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.launch.ranks import environment
from tests.real_runs import REPOSITORY

_SHOW = """
from harness.engine.build import float32_products
print(float32_products()["message"])
"""


@pytest.mark.gate("engine")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", "fp32 matrix products run in TF32"),
        (None, "fp32 matrix products run in fp32"),
    ],
)
def test_an_event_says_whether_fp32_is_tf32(value: str | None, expected: str) -> None:
    env = environment({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": value, "DS_ACCELERATOR": "cpu"})
    command = [sys.executable, "-c", _SHOW]
    shown = subprocess.check_output(command, env=env, cwd=REPOSITORY, text=True)
    assert shown.startswith(expected)
