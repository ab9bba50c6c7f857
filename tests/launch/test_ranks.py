"""The processes of a group end together."""

import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from harness.launch import fork_server, ranks
from harness.launch.ranks import raise_errors, run_module, started
from tests.real_runs import wait_for

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
        assert time.monotonic() < began + 120.0, "it waits for a rank that waits for the failed one"

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


_DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


def test_rank_that_ignores_sigterm_is_killed_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ENDING_S", 0.1)
    with started([sys.executable, "-c", _DEAF], 1, logs=tmp_path) as group:
        wait_for(group.logs[0].read_text, "a rank that ignores SIGTERM", 120)
        assert group.wait(limit_s=0.0) == [-signal.SIGKILL]


def test_ranks_end_with_the_block_that_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), started(command, 2, logs=tmp_path) as group:
        raise KeyboardInterrupt
    assert group.ended


@pytest.mark.parametrize("fails", [False, True])
def test_the_fork_server_ends_with_its_block(fails: bool) -> None:
    """An error kills it, which ends its ranks."""
    popen = mock.patch.object(fork_server.subprocess, "Popen")
    with popen as process, suppress(ZeroDivisionError), fork_server.Zygote():
        assert 1 / (not fails)
    assert process().kill.called == fails
    process().wait.assert_called_once()


def test_errors_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "0.error").write_text("stale")
    with pytest.raises(SystemExit, match=r"^the process group ended with \[1\]$"):
        run_module("no_such_module", [], 1, tmp_path)
