"""Joining the process group."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine import processes
from harness.layout.world import World
from tests.real_runs import REPOSITORY, environment, run_ranks
from tests.tables import beside
from tests.tiers import rest_in_gate

SCRIPTS, TABLES = beside(__file__, "scripts.toml"), beside(__file__, "processes.toml")


def span(text: str) -> set[int]:
    first, last = map(int, text.split("-"))
    return {*range(first, last + 1)}


@pytest.mark.parametrize(("cores", "threads"), TABLES["cores"])
def test_cpu_cores_are_divided_among_ranks_that_share_them(
    cores: list[tuple[str, str]], threads: list[int]
) -> None:
    assert processes.threads_for([(host, span(own)) for host, own in cores]) == threads


@pytest.mark.parametrize("variable", rest_in_gate("engine", ["1", None], 0))
def test_openmp_threads_are_the_rank_share_of_cores(variable: str | None, tmp_path: Path) -> None:
    """torchrun and accelerate set 1; DeepSpeed's CPU Adam runs in torch's OpenMP."""
    env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": variable}
    command = [sys.executable, "-c", SCRIPTS["shares"]]
    done = run_ranks(command, tmp_path, ranks=1, env=env).succeeded()
    threads = str(len(os.sched_getaffinity(0)))
    assert done.output.split()[-2:] == [threads, threads]


@pytest.mark.gate("engine")
@pytest.mark.parametrize(("raised", "last"), TABLES["refused"])
def test_a_rank_is_bound_to_the_gpu_it_sees_or_told_a_way_out(raised: str, last: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPTS["sees_one_gpu"].replace("SystemExit", raised)]
    env = environment(DS_ACCELERATOR="cuda", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert all(text in done.stderr.splitlines()[-1] for text in last), done.stderr


@pytest.mark.parametrize(
    ("hang_first_s", "patience_s"), rest_in_gate("engine", [(60, 4200), (7200, 7800)], 0)
)
def test_groups_wait_longer_than_the_watchdog(hang_first_s: int, patience_s: int, tmp_path) -> None:
    command = [sys.executable, "-c", SCRIPTS["patience"], str(hang_first_s)]
    env = {"PYTHONPATH": str(REPOSITORY)}
    ended = run_ranks(command, tmp_path, ranks=1, env=env).succeeded()
    assert ended.output.splitlines()[-1] == f"{patience_s} {patience_s}"


def test_deepspeed_counts_cpu_ranks_without_a_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.utils import numa

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(numa, "get_numa_cores", None)
    processes.set_environment(World(world_size=2, local_world_size=2, launcher="torch"))
    assert CPU_Accelerator().device_count() == 2


def test_each_rank_of_a_shared_gpu_is_a_host_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_HOSTID": "of the cluster"})
    world = World(1, 4, 1, 4, "torchrun", accelerator="cuda", ranks_per_gpu=4)
    processes.set_environment(world)
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    assert nccl["NCCL_HOSTID"] == f"{socket.gethostname()}-1"
    assert (nccl["NCCL_SOCKET_IFNAME"], nccl["NCCL_NET"]) == ("lo", "Socket")
    second = processes.shared_gpu_variables(replace(world, rank=2, launcher="torch"))
    assert second["NCCL_HOSTID"] != nccl["NCCL_HOSTID"]
    assert "NCCL_SOCKET_IFNAME" not in second  # maybe on several nodes
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(processes.torch.cuda, "set_device", lambda index: None)
    assert processes.own_device(world).index == 0


def test_the_ninja_beside_the_interpreter_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    processes._find_own_ninja()
    assert shutil.which("ninja") == str(Path(sys.executable).with_name("ninja"))


def test_a_ninja_of_another_environment_is_found(tmp_path, monkeypatch) -> None:
    """Its package is on sys.path, its program in that environment's folder."""
    packages = tmp_path / "lib" / "python3" / "site-packages"
    (about := packages / "ninja-1.13.0.dist-info").mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ninja\nVersion: 1.13.0\n")
    (about / "RECORD").write_text("ninja/__init__.py,,\n../../../bin/ninja,,\n")
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    processes._find_own_ninja()
    assert os.environ["PATH"] == "/usr/bin:/bin"  # the program does not exist
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ninja").touch(0o755)
    processes._find_own_ninja()
    assert os.environ["PATH"] == f"{tmp_path / 'bin'}:/usr/bin:/bin"


@pytest.mark.parametrize(("nodelist", "host"), TABLES["first_hosts"])
def test_master_address_is_first_host_of_slurm_nodelist(nodelist: str, host: str) -> None:
    assert processes.first_host(nodelist) == host


@pytest.mark.parametrize(("nodelist", "srun", "address"), TABLES["addresses"])
def test_rank_0_is_reached_by_its_hosts_name_where_that_is_known(
    nodelist: str | None, srun: str | None, address: str | None
) -> None:
    variables = {"SLURM_STEP_NODELIST": nodelist, "SLURM_LAUNCH_NODE_IPADDR": srun}
    environ = {name: value for name, value in variables.items() if value is not None}
    assert processes._slurm_address(environ) == address
