"""The process group: all ranks join and leave it together, or a failing rank ends them all."""

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d

from harness.checkpoint import collectives
from harness.errors import CannotSave, ConfigError, ExitCode, JoinRefused, RunStopped, is_full_disk
from harness.guard.failure_broadcast import Failure, FailureBroadcast, exit_now
from harness.layout.world import COUNTS_A_NODE, SHARES_GPU, World, is_free, slurm_port
from harness.plan.machine import ninja_folder
from harness.terminal import say

_LIBRARY = str(Path(__file__).resolve().parents[1]) + os.sep
_alarm: FailureBroadcast | None = None  # global, as torch's default group is
# Collectives time out this much later than the watchdog, which must still dump stacks and report.
_BEYOND_THE_WATCHDOG_S = 600.0
# Parts of the message with which NCCL before and from 2.30 on rejects ranks that share a GPU.
_SAME_GPU = ("Duplicate GPU detected", "using the same GPU")


def set_environment(world: World) -> None:
    """Set what torch and DeepSpeed read: rank, rendezvous address and number of threads.

    Raises ConfigError on rank 0 if the rendezvous port is taken.
    """
    address, port = "127.0.0.1", 29500
    if world.world_size == 1:
        port = _free_port()
    elif world.launcher == "slurm":
        address = _slurm_address(os.environ) or address
        port = slurm_port()
        if world.rank == 0 and "MASTER_PORT" not in os.environ and not is_free(port):
            raise ConfigError(
                f"the rendezvous port {port} of {socket.gethostname()} is taken: start again "
                "(each srun uses another port), or set MASTER_PORT to a free port"
            )
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ["RANK"] = str(world.rank)
    os.environ["WORLD_SIZE"] = str(world.world_size)
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    if world.ranks_per_gpu > 1:
        os.environ |= shared_gpu_variables(world)
    if world.accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed probes for devices and logs it
        # Without it DeepSpeed runs `numactl` at each reduction of ZeRO 3 (CPU_Accelerator).
        os.environ["LOCAL_SIZE"] = str(world.local_world_size)
        if "OMP_NUM_THREADS" not in os.environ:
            # The ranks of a machine share its cores; torch would give every rank all of them.
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // world.local_world_size))


def shared_gpu_variables(world: World) -> dict[str, str]:
    """Return the NCCL variables of a rank that shares its GPU with other ranks.

    NCCL rejects two ranks with the same host and GPU (src/init.cc, 2.28.9). NCCL_HOSTID replaces
    the host's name: each rank becomes a host, and talks to the others over sockets. The driver
    gives the processes turns of about 2 ms, for which kernels that wait for a peer spin.
    """
    variables = {
        "NCCL_HOSTID": f"{socket.gethostname()}-{world.rank}",
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",  # otherwise "hosts" of one NVLink domain are joined again
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",  # listens on one port per host
        "NCCL_PROTO": "Simple",  # the others spin for more turns
        "NCCL_MAX_NCHANNELS": "2",  # fewer blocks that spin, fewer sockets
    }
    is_alone = world.launcher in COUNTS_A_NODE  # sharing is for one node
    return variables | ({"NCCL_SOCKET_IFNAME": "lo"} if is_alone else {})


def own_device(world: World) -> torch.device:
    """Return the device of this process, after making it torch's current device.

    Raises ConfigError if a GPU is expected but torch sees none.
    """
    if world.accelerator == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            "the NVIDIA driver is loaded, but torch sees no GPU: check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and torch's CUDA version, or set DS_ACCELERATOR=cpu"
        )
    index = world.local_rank % count  # srun may show each task only its own GPU
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def share_cores(world: World) -> int:
    """Give CPU optimizer steps this rank's share of the available cores; return the thread count.

    Collective. torchrun gives each rank one thread and `deepspeed` gives each all cores of the
    node; both slow a CPU optimizer down. OMP_NUM_THREADS above 1 is kept as the user's choice.
    """
    cores = collectives.gather_objects((socket.gethostname(), os.sched_getaffinity(0)))
    threads = collectives.broadcast_object(threads_for(cores))
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(threads[world.rank])  # sets OpenMP's, which DeepSpeed uses, too
    return torch.get_num_threads()


def threads_for(cores: Sequence[tuple[str, set[int]]]) -> list[int]:
    """Return each rank's thread count: its cores divided by the ranks that share any of them.

    `cores`: for every rank, its host and the cores that it is bound to there.
    """
    on_host = defaultdict[str, list[set[int]]](list)
    for host, own in cores:
        on_host[host].append(own)
    return [
        max(1, len(own) // sum(bool(own & other) for other in on_host[host])) for host, own in cores
    ]


def join(world: World, hang_first_s: float = 3600.0) -> torch.device:
    """Join this process to the process group of `world`; return its device. Collective.

    Works with any launcher: DeepSpeed's environment variables are set from `world`. `hang_first_s`
    is guard.hang_first_s: collectives time out later than that, so that the watchdog detects a hang
    before NCCL, which aborts without a report.
    """
    set_environment(world)
    # Set before joining: DeepSpeed binds NCCL to LOCAL_RANK, and a rank that sees only its own GPU
    # sees it as number 0.
    device = own_device(world)
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    # torch 2.13 renamed the collectives that DeepSpeed calls, and warns once per process.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if world.accelerator == "cpu":  # a CUDA toolkit without a GPU is no fault of a CPU run
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _find_own_ninja()
    import deepspeed
    from deepspeed.utils import logger

    from harness.engine.deepspeed_0_19.patches import Joining, patch_process

    logger.setLevel(os.environ.get("DEEPSPEED_LOG_LEVEL", "WARNING").upper())
    patience = timedelta(seconds=max(3600.0, hang_first_s) + _BEYOND_THE_WATCHDOG_S)
    say = _say if world.rank == 0 else lambda text: None
    patch_process(Joining(world.accelerator, patience, say))
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=patience)
    except RuntimeError as error:
        if not any(text in str(error) for text in _SAME_GPU):
            raise
        raise JoinRefused(
            f"NCCL finds several ranks of {socket.gethostname()} on the same GPU: start one rank "
            "per GPU (check CUDA_VISIBLE_DEVICES and --gpus-per-task), or set "
            f"{SHARES_GPU}=1 to rehearse with several ranks on a GPU"
        ) from None
    _listen(world)
    atexit.register(_leave_or_end)
    return device


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: "gpu[07-09,12],cpu1" -> "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodelist)
    return match[1] + (match[2] or "") if match else ""


def _slurm_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of rank 0: its host name, or srun's address if the name does not resolve.

    srun in a batch script runs on the first node, which has rank 0.
    """
    host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR")
    return host or None


def raise_together(problem: str | None) -> None:
    """Raise ConfigError on all ranks if any of them has a problem. Collective."""
    if first := collectives.first_problem(problem):
        raise ConfigError(first)


@contextlib.contextmanager
def raising_together(where: str | None = None) -> Iterator[None]:
    """Return a context that raises one rank's ConfigError, and with `where` its ValueError, as a
    ConfigError on all ranks. Collective.
    """
    problem = None
    try:
        yield
    except ConfigError as error:
        problem = str(error)
    except ValueError as error:
        if where is None:
            raise
        problem = f"{where}: {error}"
    raise_together(problem)


def refuse_on_other_nodes(error: ConfigError) -> None:
    """End the ranks of other nodes with a problem that this node found before joining them. A
    launcher ends only the ranks of its own node; the others would wait for an hour.
    """
    with contextlib.suppress(ConfigError):  # a node without its GPU
        world = World.from_environ()
        join(world)
        failure = Failure(world.rank, int(error.code), f"on {socket.gethostname()}: {error}")
        alarm().end(failure, lambda first: None)  # it has been printed


def leave() -> None:
    """Leave the process group, as all ranks do after a normal end."""
    if _alarm is not None:
        _alarm.close()
    if torch.distributed.is_initialized():
        from deepspeed import comm  # torch alone would leave DeepSpeed groups that are gone

        (comm if comm.is_initialized() else torch.distributed).destroy_process_group()


@contextlib.contextmanager
def ending_together(refusal: str = "cannot go on") -> Iterator[None]:
    """Return a context that leaves the process group; a failure of this rank ends all at once.

    A failing rank prints its traceback (for a ConfigError, `refusal` and its problems), broadcasts
    its exit code and never destroys its group: NCCL would wait there for kernels in which the other
    ranks wait for this one. RunStopped is raised by all ranks together, and they leave normally.
    Before `join`, an exception concerns this process only.
    """
    try:
        yield
    except RunStopped:
        leave()
        raise
    except BaseException as error:
        if not torch.distributed.is_initialized():
            raise
        _end(error, refusal)
    leave()


def alarm() -> FailureBroadcast:
    """Return the alarm of the process group that this process has joined."""
    assert _alarm is not None, "join comes first"
    return _alarm


_LOST = ("onnection reset", "onnection closed", "Broken pipe", "remote process exited")
"""Parts of gloo's and NCCL's messages for a connection whose other end is gone."""


def _end(error: BaseException, refusal: str) -> NoReturn:
    """End all ranks with this rank's failure."""
    rank, code, text = torch.distributed.get_rank(), 1, f"{type(error).__name__}: {error}"
    if isinstance(error, ConfigError):
        code, text = error.code, str(error)
    elif is_full_disk(error):
        code, text = ExitCode.CANNOT_SAVE, f"cannot save: {error}{_place_of(error)}"
    failure = Failure(rank, int(code), text, alarm().place)
    if any(sign in text for sign in _LOST):
        failure = alarm().lost(failure)

    def report(first: Failure) -> None:
        """Print this rank's failure, with a traceback only if no other rank failed first."""
        if isinstance(error, ConfigError):  # usually raised on every rank
            if first is failure or first.message != text:
                say(f"{refusal}: {error}", sys.stderr)
        elif first.rank != rank:  # usually just the lost connection to the rank that failed first
            print(
                f"rank {rank}{alarm().place} ends: {first}\nits own error: {text}",
                file=sys.stderr,
                flush=True,
            )
        elif code == ExitCode.CANNOT_SAVE:
            say(text, sys.stderr)
        else:
            traceback.print_exception(error)

    alarm().end(failure, report)


def _place_of(error: BaseException) -> str:
    """Return the line of the library that was writing, unless the message names a file."""
    if isinstance(error, CannotSave) or getattr(error, "filename", None):
        return ""
    stack = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in stack if frame.filename.startswith(_LIBRARY)]
    return f" (in {lines[-1].filename}:{lines[-1].lineno}, {lines[-1].name})" if lines else ""


def _listen(world: World) -> None:
    global _alarm
    first: Any = distributed_c10d._get_default_store() if world.world_size > 1 else None
    store = first and first.clone()
    _alarm = FailureBroadcast(store, world.rank, world.world_size)
    if store is not None:
        _alarm.start()


def _leave_or_end() -> None:
    """Leave the group at interpreter exit, which would otherwise stop gloo's threads at work."""
    if hasattr(sys, "last_value"):  # an uncaught exception, already printed
        exit_now(1)
    leave()


def _find_own_ninja() -> None:
    """Put the ninja installed for this interpreter first on PATH, where torch looks for it.

    The virtual environment may not be activated. Moreover, ninja rebuilds everything, which takes
    minutes, in a folder whose log another version wrote, so it must always be the same one.
    """
    if folder := ninja_folder():
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
