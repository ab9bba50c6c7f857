"""The parity gate has been seen failing; a file by itself, so that both run beside each other."""

from __future__ import annotations

import re

import pytest

from tests.run_tools import run_tool


@pytest.mark.slow
def test_every_planted_defect_is_caught() -> None:
    done = run_tool("proofs/check_parity", "--self-test")
    assert re.search(r"^39 defects planted in \d+ cells, 0 missed$", done.stdout, re.MULTILINE)
