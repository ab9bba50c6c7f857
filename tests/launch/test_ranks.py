"""The processes of a group end together."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from harness.launch.ranks import raise_errors, started

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


@pytest.mark.parametrize("codes", [(0, 1), (0, -9), (None, 0)])
def test_rank_that_did_not_end_with_0_is_an_error(
    codes: tuple[int | None, ...], tmp_path: Path
) -> None:
    raise_errors([0, 0], tmp_path)
    with pytest.raises(SystemExit, match=re.escape(f"ended with {codes}")):
        raise_errors(codes, tmp_path)
    (tmp_path / "1.error").write_text("no memory")
    with pytest.raises(SystemExit, match=r"^no memory$"):
        raise_errors(codes, tmp_path)
