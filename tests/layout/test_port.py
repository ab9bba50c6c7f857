"""The port at which the ranks of a Slurm step meet."""

from __future__ import annotations

import socket

import pytest

from harness.engine.processes import set_environment
from harness.errors import ConfigError
from harness.layout.world import World, free_port, is_free, slurm_port

JOB = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "1"}


def test_every_job_restart_and_step_has_a_port_of_its_own() -> None:
    changes: list[dict[str, str]] = [
        {},
        {"SLURM_STEP_ID": "2"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "18"},
        {"SLURM_JOB_ID": "9_999_999"},
    ]
    ports = [slurm_port({**JOB, **change}) for change in changes]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_not_free(host: str) -> None:
    port = free_port(29_999)  # the next one is the first again
    with socket.create_server((host, port)):
        assert not is_free(port)
        assert free_port(port) not in (port, 30_000)
    assert is_free(port)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a job step in which nobody says where the ranks meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # put back as it was, whatever is set below
        monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return free_port(slurm_port(JOB))


def test_rank_0_of_srun_names_a_port_that_is_taken(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engine.processes.slurm_port", lambda: step)
    world = World(0, 2, launcher="slurm")
    with socket.create_server(("", step)):
        with pytest.raises(ConfigError, match=f"port {step} of .* is taken.*set MASTER_PORT"):
            set_environment(world)
        monkeypatch.setenv("MASTER_PORT", str(step))  # the user's own: torch's store is there
        set_environment(world)
