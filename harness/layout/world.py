"""The rank of this process, the number of ranks, and the rendezvous port."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SHARES_GPU = "HARNESS_SHARE_GPU"
"""Environment variable: 1 lets several ranks of a node share a GPU, to rehearse on one card."""
_SHARES_BY_HAND = {"NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"}
"""NCCL's variables with which users let ranks share a GPU by themselves."""
COUNTS_A_NODE = ("torchrun", "deepspeed")
"""Launchers that tell each rank the number of ranks on its own node."""
_FIRST, _COUNT = 20000, 10000  # below Linux's range for outgoing connections
_PER_JOB, _PER_RESTART = 101, 13  # so that steps of jobs on the same node use different ports


def slurm_port(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rendezvous port of a Slurm step; all its ranks compute the same one. It differs
    between jobs, restarts and steps, so that a restart after a port conflict uses another port.
    """
    job, restart, step = (
        int(environ.get(name, "0"))
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    )
    return _FIRST + (_PER_JOB * job + _PER_RESTART * restart + step) % _COUNT


def free_port(first: int) -> int:
    """Return `first`, or the next port on which no process of this host listens.

    Raises OSError if there is none.
    """
    for number in range(_COUNT):
        port = _FIRST + (first - _FIRST + number) % _COUNT
        if is_free(port):
            return port
    raise OSError(f"no port from {_FIRST} to {_FIRST + _COUNT - 1} is free")


def is_free(port: int) -> bool:
    """Return True if torch's store could listen on `port` here, on all interfaces."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=both):
            return True
    except OSError:
        return False


NVIDIA_CONTROL = Path("/dev/nvidiactl")
NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
CPU_INFO = Path("/proc/cpuinfo")
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
STATE_KERNELS = ("causal_conv1d", "mamba_ssm", "fla")
"""Import names of packages with GPU kernels for recurrent layers."""


@dataclass(frozen=True)
class World:
    """A process of the job.

    `gpu`: the model name that the driver reports, None if unknown. `allocators`: the user's
    settings of torch's allocators, which are then left unchanged.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"
    """torchrun (or accelerate) | deepspeed | torch (another that sets RANK) | mpi | slurm |
    none."""
    accelerator: Literal["cuda", "cpu"] = "cpu"
    gpu: str | None = None
    allocators: str | None = None
    kernels: tuple[str, ...] = ()
    """The installed packages of STATE_KERNELS; on GPUs only."""
    torch: str | None = None
    """The installed torch version; on GPUs only."""
    ranks_per_gpu: int = 1
    """More than 1 only if ranks share GPUs (SHARES_GPU): a rehearsal, whose times mean nothing."""
    lacking_gpus: int = 0
    """Number of this node's GPUs if it has fewer than ranks, which may not share them; else 0."""

    def has_torch(self, *version: int) -> bool:
        """Return True if torch has at least this version; assumed if it is unknown."""
        numbers = re.findall(r"\d+", self.torch or "")
        return not numbers or tuple(map(int, numbers[: len(version)])) >= version

    @property
    def rounds_pinned(self) -> bool:
        """True if torch rounds pinned memory up to powers of two: torch before 2.13 always does,
        later ones unless the user's allocator settings limit it.
        """
        if not self.has_torch(2, 13):
            return True
        return self.allocators is not None and not re.search(r"pinned_max_\w+_mb", self.allocators)

    @property
    def expands_segments(self) -> bool:
        """True if GPU memory uses expandable segments, set by the harness or the user."""
        return self.allocators is None or "expandable_segments:True" in self.allocators

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Return the world from the environment of deepspeed, torchrun and accelerate, else of
        mpirun or srun.

        Without a launcher, this is the only process. The order matters: inside a Slurm step,
        `deepspeed` sets RANK for its children, which is more specific, and mpirun starts its own
        daemons as a step. Raises ValueError for impossible numbers (rank 3 of 2), and if a launcher
        started several processes, but not as ranks.
        """
        place = (
            _from_torch_names(environ)
            or _from_mpi(environ, _MPI)
            or _from_slurm_step(environ)
            or _from_mpi(environ, _PMI)
            or _alone(environ)
        )
        launcher, rank, world_size, local_rank, local_world_size = place
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
            raise ValueError(
                f"the {launcher} environment says rank {rank} of {world_size}, local rank "
                f"{local_rank} of {local_world_size}: start every process with the same launcher"
            )
        accelerator = find_accelerator(environ)
        gpu = find_gpu_name(environ) if accelerator == "cuda" else None
        allocators = next((f"{n}={environ[n]}" for n in ALLOCATORS if environ.get(n)), None)
        return cls(
            *(rank, world_size, local_rank, local_world_size),
            *(launcher, accelerator, gpu, allocators if accelerator == "cuda" else None),
            state_kernels() if accelerator == "cuda" else (),
            torch_version() if accelerator == "cuda" else None,
            ranks_per_gpu(local_world_size, environ) if accelerator == "cuda" else 1,
            _lacking_gpus(place, environ) if accelerator == "cuda" else 0,
        )


def has_other_nodes(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the launcher started ranks on several nodes."""
    try:
        world = World.from_environ(environ)
    except ValueError:
        return False
    return world.world_size > world.local_world_size


_Place = tuple[str, int, int, int, int]


def _from_torch_names(environ: Mapping[str, str]) -> _Place | None:
    """Read RANK, WORLD_SIZE, LOCAL_RANK; torchrun adds LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE."""
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK", rank)
    sizes = {"LOCAL_WORLD_SIZE": "torchrun", "LOCAL_SIZE": "deepspeed", "WORLD_SIZE": "torch"}
    name = next(name for name in sizes if name in environ)
    return sizes[name], rank, world_size, local_rank, _number(environ, name)


_MPI = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "JSM_NAMESPACE_")
"""Beginnings of the variables RANK, SIZE, LOCAL_RANK, LOCAL_SIZE of Open MPI, MVAPICH and jsrun."""
_PMI = ("PMI_",)
"""As above, of MPICH and Intel MPI, whose local names differ; srun may set them, too."""
_LOCAL = {"PMI_LOCAL_RANK": "MPI_LOCALRANKID", "PMI_LOCAL_SIZE": "MPI_LOCALNRANKS"}


def _from_mpi(environ: Mapping[str, str], beginnings: tuple[str, ...]) -> _Place | None:
    """Read an MPI launcher's variables. Raises ValueError for several nodes without address."""
    begin = next((each for each in beginnings if f"{each}RANK" in environ), None)
    if begin is None:
        return None
    names = (f"{begin}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    rank, size, local_rank, local_size = (
        _number(environ, _LOCAL.get(name, name)) for name in names
    )
    if size > local_size and "MASTER_ADDR" not in environ:
        raise ValueError(
            f"an MPI launcher started {size} ranks on several nodes, but MASTER_ADDR is not set: "
            "export it to all ranks, with Open MPI as in mpirun -x MASTER_ADDR=NODE"
        )
    return "mpi", rank, size, local_rank, local_size


def _alone(environ: Mapping[str, str]) -> _Place:
    """Return the only process. Raises ValueError if a launcher says that there are more."""
    sizes = ("WORLD_SIZE", "FLUX_JOB_SIZE", *(f"{begin}SIZE" for begin in (*_MPI, *_PMI)))
    for name in sizes:
        if name in environ and _number(environ, name) > 1:
            raise ValueError(
                f"{name} is {environ[name]}, but no variable says which rank this process is: "
                "start it with torchrun, deepspeed, mpirun or srun"
            )
    return "none", 0, 1, 0, 1


def _from_slurm_step(environ: Mapping[str, str]) -> _Place | None:
    """Read srun's variables, inside a step only: a batch script has SLURM_PROCID=0, too.

    The local size is that of the node with the most tasks ("2(x3),1": three nodes of 2, one of 1).
    """
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _number(environ, tasks, 1)
    per_node = re.findall(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return (
        "slurm",
        _number(environ, "SLURM_PROCID"),
        world_size,
        _number(environ, "SLURM_LOCALID", 0),
        max(map(int, per_node), default=world_size),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise ValueError(f"environment variable {name} is not set, unlike others of its launcher")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} is {text!r}, not a whole number") from None


def find_accelerator(environ: Mapping[str, str] = os.environ) -> Literal["cuda", "cpu"]:
    """Return the type of device that the ranks use, without importing torch."""
    if environ.get("DS_ACCELERATOR") == "cuda":
        return "cuda"
    if environ.get("DS_ACCELERATOR") == "cpu" or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    return "cuda" if NVIDIA_CONTROL.exists() else "cpu"


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver names it."""

    name: str
    uuid: str


def find_gpu_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the first usable GPU's model name. Numbers follow PCI bus order."""
    gpus = published_gpus() or listed_gpus()
    first = environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if first.isdigit():
        gpus = gpus[int(first) :] or gpus  # a cgroup may hide some
    elif first:
        gpus = [gpu for gpu in gpus if gpu.uuid.startswith(first)] or gpus
    return gpus[0].name if gpus else None


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # nvidia-smi first: a cgroup hides GPUs from it, but not in /proc
        return [str(number) for number, _ in enumerate(listed_gpus() or published_gpus())]
    return [name for name in map(str.strip, visible.split(",")) if name]


def ranks_per_gpu(local_world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the largest number of this node's ranks that use the same GPU: 1 unless SHARES_GPU
    allows more.
    """
    if environ.get(SHARES_GPU, "").lower() not in ("1", "true", "yes"):
        return 1
    return max(1, -(-local_world_size // max(1, len(visible_gpus(environ)))))


def _lacking_gpus(place: _Place, environ: Mapping[str, str]) -> int:
    """Return the number of this node's GPUs if it has certainly fewer than ranks, otherwise 0.

    Certain are the ranks of a node under torchrun and deepspeed, and GPUs that the driver lists in
    /proc. In any other case NCCL decides. Users who set one of _SHARES_BY_HAND know what they do.
    """
    launcher, *_, local_world_size = place
    slices = "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", "")
    if launcher not in COUNTS_A_NODE or slices or _SHARES_BY_HAND & environ.keys():
        return 0
    gpus = len(published_gpus())
    return gpus if gpus < local_world_size and ranks_per_gpu(local_world_size, environ) == 1 else 0


def published_gpus() -> list[Gpu]:
    """Return the GPUs that the driver lists in /proc, in PCI bus order."""
    gpus = []
    for path in sorted(NVIDIA_PROC.glob("*/information")):
        text = path.read_text(errors="replace")
        values = dict(re.findall(r"^(Model|GPU UUID):\s*(.+?)\s*$", text, re.MULTILINE))
        if "Model" in values:
            gpus.append(Gpu(values["Model"], values.get("GPU UUID", "")))
    return gpus


def listed_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, even without /proc entries (some containers, WSL)."""
    try:
        command = ["nvidia-smi", "--list-gpus"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = re.findall(r"^GPU \d+: (.+?) \(UUID: (.+?)\)", done.stdout, re.MULTILINE)
    return [Gpu(*line) for line in lines]


def torch_version() -> str | None:
    """Return the installed torch's version, without importing it; None without torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def state_kernels() -> tuple[str, ...]:
    """Return the installed packages of STATE_KERNELS."""
    return tuple(name for name in STATE_KERNELS if importlib.util.find_spec(name))


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        name = None
    return name[1] if name else platform.machine()


def cpu_has_bf16() -> bool:
    """Return True if this CPU has bfloat16 products in hardware (AVX-512 BF16, AMX, Arm BF16).

    Others emulate it correctly, but 5 times slower than fp32 as measured here.
    """
    try:
        words = set(CPU_INFO.read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
