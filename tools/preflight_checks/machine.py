"""A rank's machine: its GPU and driver, matrix products, memory, and the limits of the system."""

import fcntl
import hashlib
import os
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.config.ds_json import offloaded_to
from harness.engine.launches import launch_ms
from harness.engine.processes import own_device
from harness.estimate.fit import free_on_host, memory_line, shortages
from harness.estimate.hardware import known_gpu
from harness.estimate.memory_item import GIB
from harness.layout.world import SHARES_GPU
from harness.plan.duration import step_line, step_time
from harness.plan.make import takes
from harness.plan.plan import Plan
from tools.preflight_checks.report import (
    Row,
    by_text,
    count,
    grouped,
    named_row,
    problem_row,
    same_row,
    slow,
    span,
    who,
)

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
SHARED_BYTES_PER_RANK = GIB  # NCCL's buffers and DeepSpeed's between the ranks of a node
FREE_PART = 0.9  # of a GPU that nobody else uses; its driver and ECC keep a few percent
_OWN_FILES, _FILES_PER_PEER = 512, 4  # guessed: sockets to every other rank, in a few groups
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_EDGE = {"cuda": 8192, "cpu": 512}
_MULTIPLY_S, _WINDOWS = 1.0, 9
_EXACT_EDGE = {"cuda": 4096, "cpu": 256}
_SPARSE = 64  # about one factor in this many is not 0
_REPEATS = 8
_COMMAND_S = 20.0  # time limit of nvcc and dmesg


@dataclass(frozen=True)
class Driver:
    """NVML's answers about one GPU. None: the driver did not answer."""

    version: str | None = None
    cuda: str | None = None  # the newest CUDA that this driver runs
    bus_id: str | None = None
    """As the kernel's log writes it: "0000:06:00"."""
    link_width: int | None = None  # the maximum of the PCIe link
    ecc: str | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One rank's machine. None: unknown. Texts of problems are empty if there are none."""

    gpu: str = "no GPU"
    gpu_id: str | None = None
    gpu_free_bytes: int | None = None
    gpu_total_bytes: int | None = None
    ecc: str = "unknown"  # or "Enabled, 0 uncorrected errors"
    tflops: float = 0.0
    """Of matrix products in the run's precision, while all ranks of the node compute."""
    host_free_bytes: int | None = None
    shared_free_bytes: int | None = None
    memlock_bytes: int | None = None  # None: unlimited
    open_files: int = 0
    cores: tuple[int, ...] = ()
    """Numbers of the cores that this rank may use."""
    infiniband: bool = False
    shortages: tuple[str, ...] = ()
    """Memory that the run needs but this machine lacks (harness/estimate/fit.py)."""
    launch_ms: float | None = None  # in which the host launches a Llama layer's forward pass
    checksum: str = ""  # of exact products of small whole numbers: the same on every device
    steady: bool = True  # False if one of several such products differed from the first
    locks: str = ""  # why builds in the folder of compiled operators cannot be locked
    toolkit: str = ""  # versions of CUDA: the driver's, torch's, the compiler's
    toolkit_problem: str = ""
    health: str = ""  # problems of the GPU that its driver reports
    links: str = ""  # its connections to the other GPUs of the node that this rank sees


def measure_machine(plan: Plan, free_gpu: int | None = None) -> Machine:
    """Measure this rank's machine. `free_gpu`: bytes for this rank before any rank used its GPU."""
    on_cuda = plan.world.accelerator == "cuda"
    device, host = own_device(plan.world), free_on_host()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    tflops = matmul_tflops(device, _DTYPES[plan.precision])  # first: all ranks of a node together
    checksum, steady = exact_products(device)
    short = shortages(plan.estimate, free_gpu, host, takes(plan)) if plan.estimate else ()
    machine = Machine(
        tflops=tflops,
        host_free_bytes=host,
        shared_free_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=(*sorted(os.sched_getaffinity(0)),),
        infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        shortages=(*short,),
        checksum=checksum,
        steady=steady,
        locks=lock_problem(extension_folder()),
    )
    return _with_gpu(machine, device, free_gpu) if on_cuda else machine


def _with_gpu(machine: Machine, device: torch.device, free_bytes: int | None) -> Machine:
    from torch.utils.cpp_extension import CUDA_HOME  # warns without a GPU

    about = torch.cuda.get_device_properties(device)
    driver = ask_driver(f"GPU-{about.uuid}")
    release = re.search(r"release (\d+\.\d+)", _output(f"{CUDA_HOME}/bin/nvcc", "--version"))
    nvcc = release[1] if release else None
    others = [n for n in range(torch.cuda.device_count()) if n != device.index]
    peers = sum(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    reach = f"reaches the memory of {peers} of {len(others)} others directly"
    width = f"{driver.link_width}x" if driver.link_width else "unknown"
    return replace(
        machine,
        gpu=about.name,
        gpu_id=f"GPU-{about.uuid}",
        gpu_free_bytes=free_bytes,
        gpu_total_bytes=about.total_memory,
        ecc=driver.ecc or "unknown",
        toolkit=f"driver {driver.version or 'unknown'} (CUDA {driver.cuda or 'unknown'}), "
        f"torch's CUDA {torch.version.cuda}, nvcc {nvcc or 'not found'}",
        toolkit_problem=toolkit_problem(driver.cuda, torch.version.cuda, nvcc),
        health="; ".join([*driver.problems, *parse_xids(_output("dmesg"), driver.bus_id)]),
        launch_ms=launch_ms(device),
        links=f"PCIe {width}; {reach if others else 'sees no other GPU'}",
    )


# --- measurements ---


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of square matrix products over about a second, in 10**12 operations per
    second.
    """
    edge = _EDGE[device.type]
    a, b, out = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(3))
    torch.mm(a, b, out=out)  # loads the libraries
    _finish(device)
    products = 0
    rates: list[float] = []
    began = last = time.perf_counter()
    while last - began < _MULTIPLY_S or len(rates) < 3:
        torch.mm(a, b, out=out)
        _finish(device)
        products += 1
        now = time.perf_counter()
        if now - last >= _MULTIPLY_S / _WINDOWS:
            rates.append(products / (now - last))
            products, last = 0, now
    # 2: a multiplication and an addition. The median, so that a brief pause has no effect.
    return 2 * edge**3 * statistics.median(rates) / 1e12


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exact_products(device: torch.device) -> tuple[str, bool]:
    """Return a digest of a matrix product, and True if repeated products are equal.

    Factors are -1, 0 and 1, mostly 0: sums stay below 256 and are exact in bf16. A GPU that
    silently miscalculates gives a different digest from its neighbours.
    """
    edge = _EXACT_EDGE[device.type]
    generator = torch.Generator().manual_seed(0)
    signs, sparse = (torch.randint(-1, 2, (edge, edge), generator=generator) for _ in range(2))
    sparse *= torch.randint(0, _SPARSE, (edge, edge), generator=generator) == 0
    a, b = (factor.to(torch.bfloat16).to(device) for factor in (signs, sparse))
    first = a @ b
    steady = all(torch.equal(a @ b, first) for _ in range(_REPEATS))
    digest = hashlib.sha256(first.cpu().to(torch.int32).numpy().tobytes())
    return digest.hexdigest()[:12], steady


def ask_driver(gpu_id: str) -> Driver:
    """Ask NVML about a GPU. A missing package or driver is one of the problems."""
    try:
        import pynvml as nvml
    except ImportError:
        return Driver(problems=("not checked, nvidia-ml-py is missing: pip install nvidia-ml-py",))
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(gpu_id)
    except nvml.NVMLError as error:
        return Driver(problems=(f"not checked, the driver does not answer: {error}",))

    def ask(query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return query(*arguments)
        except nvml.NVMLError:  # not supported by every GPU, driver and MIG slice
            return None

    ecc = ask(nvml.nvmlDeviceGetEccMode, gpu)
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, *kinds)
    place = ask(nvml.nvmlDeviceGetPciInfo, gpu)
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Driver(
        ask(nvml.nvmlSystemGetDriverVersion),
        f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}" if place else None,
        ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        ecc
        and f"{'Enabled' if ecc[0] else 'Disabled'}, "
        f"{'unknown' if errors is None else errors} uncorrected errors",
        tuple(_gpu_problems(nvml, gpu, ask)),
    )


def _gpu_problems(nvml: Any, gpu: Any, ask: Callable[..., Any]) -> list[str]:
    clocks = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu) or 0
    _, _, pending, failed = ask(nvml.nvmlDeviceGetRemappedRows, gpu) or (0, 0, 0, 0)
    width = ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, gpu)
    most = ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, gpu)
    # Newer drivers report the first in place of the two others.
    recovery = [
        nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        nvml.NVML_FI_DEV_RESET_STATUS,
        nvml.NVML_FI_DEV_DRAIN_AND_RESET_STATUS,
    ]
    answers = ask(nvml.nvmlDeviceGetFieldValues, gpu, recovery) or []
    problems = {
        "the driver asks for a reset": any(
            answer.nvmlReturn == nvml.NVML_SUCCESS and answer.value.uiVal for answer in answers
        ),
        "the hardware slows its clocks": clocks & nvml.nvmlClocksEventReasonHwSlowdown,
        "heat slows its clocks": clocks & nvml.nvmlClocksEventReasonSwThermalSlowdown,
        "remapped rows are pending": pending,
        "remapping rows failed": failed,
        f"PCIe link is {width}x wide of {most}x": width and most and width != most,
    }
    return [text for text, bad in problems.items() if bad]


def parse_xids(kernel_log: str, bus_id: str | None) -> list[str]:
    """Return the driver's errors of one GPU in the kernel's log: "Xid 79 (2 times)"."""
    listed = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", kernel_log)
    counts = Counter(number for bus, number in listed if bus_id in (None, bus.lower()))
    return [f"Xid {number} ({count} times)" for number, count in counts.items()]


def toolkit_problem(driver: str | None, torchs: str | None, nvcc: str | None) -> str:
    """Return why three versions of CUDA do not work together; "" if they do.

    Within a major version, new toolkits run on older drivers; nvcc must match torch's own.
    """
    major = [version and int(version.partition(".")[0]) for version in (driver, torchs, nvcc)]
    if major[0] and major[1] and major[0] < major[1]:
        return f"the driver is of CUDA {driver}, torch of {torchs}: it will find no GPU"
    if major[1] and major[2] and major[2] != major[1]:
        return f"nvcc is of CUDA {nvcc}, torch of {torchs}: operators that it builds may not load"
    return ""


def _output(*command: str) -> str:
    """Return the output of a command; "" if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout


def extension_folder() -> Path:
    """Return the folder in which torch builds operators, or the nearest one that exists."""
    from torch.utils.cpp_extension import get_default_build_root

    wished = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).absolute()
    return next(path for path in (wished, *wished.parents) if path.is_dir())


def lock_problem(folder: Path) -> str:
    """Return why a file in `folder` cannot be locked; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


# --- judged on rank 0, which has the machines of all ranks ---

Machines = dict[int, Machine]


def _each(machines: Machines, name: str) -> dict[int, Any]:
    """Return a value of every rank's machine."""
    return {rank: getattr(machine, name) for rank, machine in machines.items()}


def machine_rows(
    plan: Plan, machines: Machines, hosts: Sequence[str], rates: Mapping[str, Any]
) -> list[Row]:
    """Return the checks of all machines. `machines`: by rank; `rates`: their medians."""
    on_cuda = plan.world.accelerator == "cuda"
    step = step_time(plan, rates)  # None for GPUs that are not in the table
    return [
        *(_gpu_rows(machines, hosts, plan.world.ranks_per_gpu) if on_cuda else []),
        _speed(plan, machines, hosts),
        _memory(plan, machines, hosts),
        *([Row("time of a step", "ok", step_line(step))] if step else []),
        *([_launches(machines, hosts), _cores(machines, hosts)] if on_cuda else []),
        *_limit_rows(plan, machines, hosts),
        *_product_rows(machines, hosts),
        *(_driver_rows(machines, hosts) if on_cuda else []),
    ]


def _gpu_rows(machines: Machines, hosts: Sequence[str], sharing: int) -> list[Row]:
    """Return the rows about GPUs. `sharing`: ranks that may use the same one."""
    kinds = {
        rank: f"{m.gpu}, {(m.gpu_total_bytes or 0) / GIB:.0f} GiB" for rank, m in machines.items()
    }
    todo = "request one GPU type: the slowest sets the pace, the smallest the micro-batch"
    rows = [same_row("GPU", kinds, hosts, todo, "warn")]
    ranks_of = by_text((rank, machine.gpu_id or str(rank)) for rank, machine in machines.items())
    each = "one per rank" if sharing == 1 else f"each for up to {sharing} ranks ({SHARES_GPU})"
    own = Row("GPU of its own", "ok", f"{count(len(ranks_of), 'GPU')}, {each}")
    if shared := [who(ranks, hosts) for ranks in ranks_of.values() if len(ranks) > sharing]:
        todo = "start one rank per GPU, and check CUDA_VISIBLE_DEVICES and --gpus-per-task"
        own = Row("GPU of its own", "FAIL", f"one GPU for {'; for '.join(shared)}", todo)
    free = {rank: m.gpu_free_bytes / GIB for rank, m in machines.items() if m.gpu_free_bytes}
    least = {
        rank: FREE_PART * (machines[rank].gpu_total_bytes or 0) / sharing / GIB for rank in free
    }
    taken = [rank for rank in free if free[rank] < least[rank]]
    text = span(free.values(), "GiB") if free else "unknown to the driver"
    todo = "nvidia-smi there shows which process holds it: end it, or drain the node"
    rows += [own, named_row("GPU memory free", text, "not all free:", taken, hosts, todo)]
    todo = "drain a GPU with uncorrected errors; if ECC is off on only one GPU, turn it on"
    return [*rows, same_row("GPU ECC", _each(machines, "ecc"), hosts, todo, "warn")]


def _launches(machines: Machines, hosts: Sequence[str]) -> Row:
    times = {rank: machine.launch_ms for rank, machine in machines.items() if machine.launch_ms}
    text = span(times.values(), "ms", ".2f") if times else "unknown time"
    text += " to launch a layer's forward pass"
    slow_hosts = slow({rank: 1 / milliseconds for rank, milliseconds in times.items()})
    todo = "short steps wait for the slowest host: check its clocks, and what else runs there"
    return named_row("launches", text, "slow:", slow_hosts, hosts, todo)


def _speed(plan: Plan, machines: Machines, hosts: Sequence[str]) -> Row:
    rates = _each(machines, "tflops")
    unit, scale = ("TFLOP/s", 1.0) if max(rates.values()) >= 1 else ("GFLOP/s", 1e3)
    text = f"{span([scale * rate for rate in rates.values()], unit)} in {plan.precision}"
    if plan.world.ranks_per_gpu > 1:
        return Row("matmul rate", "ok", f"{text}, not judged: ranks share a GPU")
    gpu = known_gpu(plan.world.gpu)
    if gpu:
        part = max(rates.values()) / gpu.peak_tflops(plan.precision)
        text += f", at most {part:.0%} of the datasheet's"
    todo = (
        "every step waits for the slowest: check for throttled clocks, heat and other processes "
        "there, or leave the node out (--exclude)"
    )
    return named_row("matmul rate", text, "slow:", slow(rates), hosts, todo)


def _memory(plan: Plan, machines: Machines, hosts: Sequence[str]) -> Row:
    host = [m.host_free_bytes / GIB for m in machines.values() if m.host_free_bytes]
    free = span(host, "GiB of host memory free", ".0f") if host else "host memory unknown"
    if plan.estimate is None:
        return Row("memory", "ok", f"not estimated for this architecture; {free}")
    texts = [(rank, text) for rank, machine in machines.items() for text in machine.shortages]
    short = by_text((rank, text.partition(", but ")[0]) for rank, text in texts)
    if not short:
        return Row("memory", "ok", f"{memory_line(plan.estimate)}; {free}")
    text = f"{grouped(short, hosts)}, and less is free; {free}"
    verdict = "warn" if plan.config.plan.force else "FAIL"
    return Row("memory", verdict, text, texts[0][1].partition(": ")[2])


def _cores(machines: Machines, hosts: Sequence[str]) -> Row:
    """Compare each node's number of ranks with the cores that they may use together."""
    cores: dict[str, set[int]] = {}
    for rank, machine in machines.items():
        cores.setdefault(hosts[rank], set()).update(machine.cores)
    few = [rank for rank in machines if len(cores[hosts[rank]]) < hosts.count(hosts[rank])]
    todo = "request at least a core per rank (--exclusive, --cpus-per-gpu): ranks wait for theirs"
    text = span(map(len, cores.values()), "for the ranks of a node", "d")
    return named_row("cores", text, "fewer than ranks on", few, hosts, todo)


def _limit_rows(plan: Plan, machines: Machines, hosts: Sequence[str]) -> list[Row]:
    shared = Row("/dev/shm", "warn", "cannot be read", "mount it: NCCL uses it between ranks")
    free = {r: m.shared_free_bytes for r, m in machines.items() if m.shared_free_bytes is not None}
    if free:
        text = span((size / GIB for size in free.values()), "GiB free")
        few = [r for r, n in free.items() if n < SHARED_BYTES_PER_RANK * hosts.count(hosts[r])]
        todo = "give the node 1 GiB per rank (in a container --shm-size)"
        shared = named_row("/dev/shm", text, "little on", few, hosts, todo)
    needed = _OWN_FILES + _FILES_PER_PEER * len(hosts)
    files = _each(machines, "open_files")
    text = f"{span(files.values(), 'allowed', 'd')}, about {needed} needed"
    few = [rank for rank, limit in files.items() if limit < needed]
    todo = (
        f"`ulimit -n {needed}` or more in slurm/site.env: a rank needs a socket to every other rank"
    )
    opened = named_row("open files", text, "too few on", few, hosts, todo)
    return [shared, _memlock(plan, machines, hosts), opened]


def _memlock(plan: Plan, machines: Machines, hosts: Sequence[str]) -> Row:
    limits = {r: m.memlock_bytes for r, m in machines.items() if m.memlock_bytes is not None}
    if not limits:
        return Row("memlock", "ok", "unlimited")
    text = span((size / GIB for size in limits.values()), "GiB", ".3f")
    offloads = "cpu" in (offloaded_to(plan.deepspeed, part) for part in ("optimizer", "param"))
    pins = [r for r in limits if machines[r].infiniband or (offloads and machines[r].gpu_id)]
    if not pins:
        return Row("memlock", "ok", f"{text}, and nothing here pins memory")
    todo = "InfiniBand and offload pin memory: set `ulimit -l unlimited` for jobs (limits.conf)"
    return named_row("memlock", text, "limited on", pins, hosts, todo)


def _product_rows(machines: Machines, hosts: Sequence[str]) -> list[Row]:
    checksums = {
        rank: machine.checksum if machine.steady else "a different one each time"
        for rank, machine in machines.items()
    }
    todo = "that device computes wrong results without an error: drain the node and have it tested"
    fine, locks = "the folder of compiled operators supports locks", _each(machines, "locks")
    advice = (
        "set TORCH_EXTENSIONS_DIR to a local folder of the node: otherwise two ranks may "
        "build at once"
    )
    return [
        same_row("matmul checksum", checksums, hosts, todo),
        problem_row("build locks", fine, locks.items(), hosts, advice),
    ]


def _driver_rows(machines: Machines, hosts: Sequence[str]) -> list[Row]:
    problems, toolkits = _each(machines, "toolkit_problem"), _each(machines, "toolkit")
    todo = "install torch for the driver's CUDA, or set CUDA_HOME to a toolkit of torch's"
    versions = problem_row("CUDA versions", "", problems.items(), hosts, todo)
    if versions.verdict == "ok":
        todo = "update the node that differs"
        versions = same_row("CUDA versions", toolkits, hosts, todo, "warn")
    fine = "no remapped rows pending, no slowdown, no reset required"
    todo = "see nvidia-smi -q and dmesg there; a reset repairs pending rows, else drain the node"
    advice = "see nvidia-smi topo -m there: a GPU without peer access copies through the host"
    return [
        versions,
        problem_row("GPU health", fine, _each(machines, "health").items(), hosts, todo),
        same_row("GPU links", _each(machines, "links"), hosts, advice, "warn"),
    ]
