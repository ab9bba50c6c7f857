"""Joining the process group."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from harness.engine import processes


def test_the_ninja_beside_the_interpreter_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    processes._find_own_ninja()
    assert shutil.which("ninja") == str(Path(sys.executable).with_name("ninja"))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[07-09,12],cpu1", "gpu07"), ("node1,node2", "node1"), ("a-b.c", "a-b.c"), ("", "")],
)
def test_the_first_host_of_slurms_list(nodelist: str, host: str) -> None:
    assert processes.first_host(nodelist) == host


@pytest.mark.parametrize(
    ("nodelist", "srun", "address"),
    [
        ("localhost,elsewhere", "10.0.0.9", "localhost"),
        ("no-such-host.invalid", "10.0.0.9", "10.0.0.9"),
        ("no-such-host.invalid", None, None),
        (None, "10.0.0.9", "10.0.0.9"),
        (None, None, None),
    ],
)
def test_rank_0_is_reached_by_its_hosts_name_where_that_is_known(
    nodelist: str | None, srun: str | None, address: str | None
) -> None:
    given = {"SLURM_STEP_NODELIST": nodelist, "SLURM_LAUNCH_NODE_IPADDR": srun}
    environ = {name: value for name, value in given.items() if value is not None}
    assert processes._slurm_address(environ) == address
