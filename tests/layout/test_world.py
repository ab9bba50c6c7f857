"""A process's position among the ranks, its device, and the rendezvous port of a Slurm step."""

import importlib.metadata
import socket

import pytest

from harness.engine.processes import set_environment
from harness.errors import ConfigError
from harness.layout import world as module
from harness.layout.world import World, find_accelerator, free_port, slurm_port, visible_gpus
from tests.tables import beside

TABLES = beside(__file__, "world.toml")

ROWS = TABLES["rows"]


def variables(*texts: str) -> dict[str, str]:
    return dict(pair.split("=") for text in texts for pair in text.split())


@pytest.mark.parametrize(("environ", "expected"), ROWS["launchers"])
def test_world_is_read_from_each_launcher(environ, expected):
    world = World.from_environ({**variables(*environ), "DS_ACCELERATOR": "cpu"})
    place = (world.launcher, world.rank, world.world_size, world.local_rank)
    assert [*place, world.local_world_size] == expected
    assert (world.accelerator, world.gpu) == ("cpu", None)


@pytest.mark.parametrize(("environ", "expected"), ROWS["impossible"])
def test_impossible_rank_environment_is_rejected(environ, expected):
    with pytest.raises(ValueError, match=expected):
        World.from_environ(variables(*environ))


@pytest.mark.parametrize(
    ("rank", "ranks_of_node", "expected"), [("1", "1", True), ("1", "2", False), ("5", "1", False)]
)
def test_impossible_ranks_are_on_one_node(rank: str, ranks_of_node: str, expected: bool) -> None:
    """They cannot be joined to be told that this one is refused."""
    environ = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert module.has_other_nodes(environ | {"LOCAL_WORLD_SIZE": ranks_of_node}) == expected


@pytest.mark.parametrize(("environ", "rounds", "expands"), TABLES["allocators"])
def test_the_users_allocators_are_read(environ, rounds, expands, monkeypatch):
    monkeypatch.setattr("harness.layout.world.torch_version", lambda: "2.13.0")
    world = World.from_environ({**environ, "DS_ACCELERATOR": "cuda"})
    assert world.allocators == next((f"{n}={value}" for n, value in environ.items()), None)
    assert (world.rounds_pinned, world.expands_segments) == (rounds, expands)
    assert World.from_environ({**environ, "DS_ACCELERATOR": "cpu"}).allocators is None


def test_pinned_memory_is_rounded_unless_torch_has_a_setting(monkeypatch):
    ours, users = {"DS_ACCELERATOR": "cuda"}, {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:64"}
    for version, rounds in (("2.10.0a0+b4", True), ("2.12.1", True), ("2.13.0+cu130", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, v=version: v)
        assert World.from_environ(ours).rounds_pinned is rounds
        assert World.from_environ({**ours, **users}).rounds_pinned is rounds
    assert not World.from_environ({"DS_ACCELERATOR": "cpu"}).rounds_pinned

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)  # a laptop for planning
    assert World.from_environ(ours).has_torch(2, 13)


def test_accelerator_is_read_from_the_driver_not_from_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NVIDIA_CONTROL", tmp_path / "nvidiactl")
    assert find_accelerator({}) == "cpu"
    assert find_accelerator({"DS_ACCELERATOR": "cuda"}) == "cuda"  # as with WSL
    (tmp_path / "nvidiactl").touch()
    assert find_accelerator({}) == "cuda"
    for hidden in ("DS_ACCELERATOR=cpu", "CUDA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES=-1"):
        assert find_accelerator(variables(hidden)) == "cpu"
    assert find_accelerator({"CUDA_VISIBLE_DEVICES": "1"}) == "cuda"


FIRST, SECOND = "NVIDIA H200", "NVIDIA L4"


@pytest.mark.parametrize("source", ["/proc", "nvidia-smi"])
def test_gpu_name_is_that_of_the_first_visible_gpu(tmp_path, monkeypatch, source):
    """Containers and WSL may lack /proc/driver/nvidia."""
    monkeypatch.setattr(module, "NVIDIA_PROC", tmp_path / "gpus")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.find_gpu_name({}) is None
    if source == "/proc":
        for place, name, uuid in (("17", FIRST, "GPU-01ab"), ("2a", SECOND, "GPU-02cd")):
            (folder := tmp_path / "gpus" / f"0000:{place}:00.0").mkdir(parents=True)
            text = f"Model: \t\t {name}\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\n"
            (folder / "information").write_text(text)
    else:
        (tool := tmp_path / "nvidia-smi").write_text(TABLES["nvidia_smi"])
        tool.chmod(0o755)
    names = {None: FIRST, "0": FIRST, "1,0": SECOND, "GPU-02": SECOND, "7": FIRST, "MIG-9": FIRST}
    for visible, name in names.items():
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert module.find_gpu_name(environ) == name, visible
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, GPU-02,"}) == ["4", "GPU-02"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize(("gpus", "environ", "sharing", "lacking"), ROWS["shared"])
def test_ranks_share_a_gpu_only_when_asked_to(gpus, environ, sharing, lacking, monkeypatch):
    monkeypatch.setattr(module, "published_gpus", lambda: [module.Gpu("NVIDIA H200", "")] * gpus)
    monkeypatch.setattr(module, "listed_gpus", module.published_gpus)
    world = World.from_environ({**variables(*environ), "DS_ACCELERATOR": "cuda"})
    assert (world.ranks_per_gpu, world.lacking_gpus) == (sharing, lacking)
    world = World.from_environ({**variables(*environ), "DS_ACCELERATOR": "cpu"})
    assert (world.ranks_per_gpu, world.lacking_gpus) == (1, 0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("avx512_bf16", True), ("amx_bf16", True), ("bf16", True), ("avx512f", False), (None, False)],
)
def test_bf16_of_a_cpu_is_read_from_the_kernel(tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    assert module.cpu_has_bf16() is expected


JOB = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "1"}


def test_every_job_restart_and_step_has_a_port_of_its_own() -> None:
    names = ("OTHER=1", "STEP_ID=2", "RESTART_COUNT=1", "JOB_ID=18", "JOB_ID=9_999_999")
    ports = [slurm_port(JOB | variables(f"SLURM_{change}")) for change in names]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_not_free(host: str) -> None:
    port = free_port(29_999)  # wraps around to the first port
    with socket.create_server((host, port)):
        assert not module.is_free(port)
        assert free_port(port) not in (port, 30_000)
    assert module.is_free(port)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the port of a job step without a configured rendezvous."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever is set below
        monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return free_port(slurm_port(JOB))


def test_rank_0_of_srun_names_a_taken_port(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engine.processes.slurm_port", lambda: step)
    world = World(0, 2, launcher="slurm")
    with socket.create_server(("", step)):
        with pytest.raises(ConfigError, match=f"port {step} of .* is taken.*set MASTER_PORT"):
            set_environment(world)
        monkeypatch.setenv("MASTER_PORT", str(step))  # the user's own, where torch's store is
        set_environment(world)
