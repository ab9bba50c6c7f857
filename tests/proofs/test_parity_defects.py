"""The parity gate has been seen failing; a file by itself, so that both run beside each other."""

from __future__ import annotations

import re

import pytest

from tests.run_tools import run_tool
from tools.proofs.parity.defects.table import BRIEF, DEFECTS


def missed_none(defects: int, *arguments: str) -> bool:
    done = run_tool("proofs/check_parity", "--self-test", *arguments)
    caught = rf"^{defects} defects planted in \d+ cells, 0 missed$"
    return bool(re.search(caught, done.stdout, re.MULTILINE))


@pytest.mark.slow("six engines and plain loops of 20 steps")
def test_three_planted_defects_are_caught() -> None:
    assert missed_none(len(BRIEF), "--brief")


@pytest.mark.gate("defects")
def test_every_planted_defect_is_caught() -> None:
    assert missed_none(len(DEFECTS))
