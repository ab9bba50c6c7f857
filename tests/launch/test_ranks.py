"""The processes of a group end together."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from harness.launch.ranks import started

_ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(7)
time.sleep(600)
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_whichever_rank_fails_the_other_does_not_outlive_it(failing: int) -> None:
    began = time.monotonic()

    def still_patient() -> None:
        assert time.monotonic() < began + 120.0, (
            "it waits for a rank that waits for one that failed"
        )

    with started([sys.executable, "-c", _ONE_FAILS, str(failing)], 2) as group:
        codes = group.wait(meanwhile=still_patient, patience_s=0.1)
    assert codes[failing] == 7
    assert codes[1 - failing] == -signal.SIGTERM
