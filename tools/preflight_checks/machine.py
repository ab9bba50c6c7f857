"""A rank's machine: its GPU, how fast it multiplies, memory, and what the system allows."""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.config.ds_json import offloaded_to
from harness.estimate.fit import free_on_gpu, free_on_host, memory_line, shortages
from harness.estimate.hardware import known_gpu
from harness.estimate.held import GIB
from harness.plan.changes import takes
from harness.plan.duration import step_line, step_time
from harness.plan.plan import Plan
from tools.preflight_checks.report import Row, by_text, grouped, same_row, slow, span, who

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
SHARED_BYTES_PER_RANK = GIB  # NCCL's buffers and DeepSpeed's between the ranks of a node
FREE_PART = 0.9  # of a GPU that nobody else uses; its driver and ECC keep a few per cent
_OWN_FILES, _FILES_PER_PEER = 512, 4  # guessed: sockets to every other rank, a few groups of them
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_EDGE = {"cuda": 8192, "cpu": 512}
_MULTIPLY_S, _WINDOWS = 1.0, 9


@dataclass(frozen=True)
class Machine:
    """One rank's machine; None for unknown values."""

    gpu: str = "no GPU"
    gpu_id: str | None = None
    gpu_free_bytes: int | None = None
    gpu_total_bytes: int | None = None
    ecc: str | None = None
    """ "Enabled, 0 uncorrected errors", as the driver has it."""
    tflops: float = 0.0
    """Of matrix products in the run's precision, with all ranks of the node at work."""
    host_free_bytes: int | None = None
    shared_free_bytes: int | None = None
    memlock_bytes: int | None = None
    """None: as much as there is."""
    open_files: int = 0
    infiniband: bool = False
    shortages: tuple[str, ...] = ()
    """Shortages of this machine for the run (harness/estimate/fit.py)."""


def measure_machine(plan: Plan, device: torch.device, free_gpu: int | None) -> Machine:
    """Look at this rank's machine. `free_gpu`: bytes, from before torch took its own."""
    host = free_on_host()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    machine = Machine(
        tflops=matmul_tflops(device, _DTYPES[plan.precision]),
        host_free_bytes=host,
        shared_free_bytes=_free(SHARED_MEMORY),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        shortages=tuple(shortages(plan.estimate, free_gpu, host, takes(plan)))
        if plan.estimate
        else (),
    )
    if device.type != "cuda":
        return machine
    about = torch.cuda.get_device_properties(device)
    name = f"GPU-{about.uuid}"  # as nvidia-smi has it
    return replace(
        machine,
        gpu=about.name,
        gpu_id=name,
        gpu_free_bytes=free_gpu,
        gpu_total_bytes=about.total_memory,
        ecc=_ecc(name),
    )


def free_gpu_bytes(plan: Plan) -> int | None:
    """Return the free memory of this rank's GPU by its driver, before torch uses the GPU."""
    return free_on_gpu(plan.world.local_rank) if plan.world.accelerator == "cuda" else None


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """10**12 operations a second of square matrix products, over about a second."""
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
    # 2: a multiplication and an addition. The median: a moment's pause is not a slow machine.
    return 2 * edge**3 * statistics.median(rates) / 1e12


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _ecc(gpu_id: str) -> str | None:
    fields = "ecc.mode.current,ecc.errors.uncorrected.volatile.total"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", gpu_id]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        mode, errors = done.stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # no driver's tool here, or a slice of a GPU that it does not list
    return f"{mode}, {errors} uncorrected errors"


# --- judged on rank 0, which has the machines of all ranks ---

Machines = dict[int, Machine]


def machine_rows(
    plan: Plan, machines: Machines, hosts: Sequence[str], rates: Mapping[str, Any]
) -> list[Row]:
    """The checks of all machines; `machines` by rank, `rates`: their medians."""
    rows = _gpu_rows(machines, hosts) if plan.world.accelerator == "cuda" else []
    return [
        *rows,
        _speed(plan, machines, hosts),
        _memory(plan, machines, hosts),
        *_step(plan, rates),
        _shared_memory(machines, hosts),
        _memlock(plan, machines, hosts),
        _open_files(machines, hosts),
    ]


def _gpu_rows(machines: Machines, hosts: Sequence[str]) -> list[Row]:
    kinds = {
        rank: f"{m.gpu}, {(m.gpu_total_bytes or 0) / GIB:.0f} GiB" for rank, m in machines.items()
    }
    todo = "book one kind: the slowest sets the pace, the smallest the micro-batch"
    rows = [same_row("GPU", kinds, hosts, todo, "warn")]
    ranks_of = by_text((rank, machine.gpu_id or str(rank)) for rank, machine in machines.items())
    shared = [who(ranks, hosts) for ranks in ranks_of.values() if len(ranks) > 1]
    if shared:
        todo = "start one rank for each GPU, and check CUDA_VISIBLE_DEVICES and --gpus-per-task"
        rows.append(Row("GPU of its own", "FAIL", f"one GPU for {'; for '.join(shared)}", todo))
    else:
        rows.append(Row("GPU of its own", "ok", f"{len(ranks_of)} GPUs, one for each rank"))
    free = {rank: m.gpu_free_bytes / GIB for rank, m in machines.items() if m.gpu_free_bytes}
    taken = [r for r, f in free.items() if f < FREE_PART * (machines[r].gpu_total_bytes or 0) / GIB]
    text = span(free.values(), "GiB") if free else "the driver does not say"
    if taken:
        todo = "nvidia-smi there shows what holds it: end it, or drain the node"
        text = f"{text}; not all free: {who(taken, hosts)}"
    rows.append(Row("GPU memory free", "warn" if taken else "ok", text, todo if taken else ""))
    ecc = {rank: machine.ecc or "not told" for rank, machine in machines.items()}
    todo = "uncorrected errors are a GPU to drain; ECC off on one alone is a setting that was lost"
    row = same_row("GPU ECC", ecc, hosts, todo, "warn")
    return [*rows, row]


def _speed(plan: Plan, machines: Machines, hosts: Sequence[str]) -> Row:
    rates = {rank: machine.tflops for rank, machine in machines.items()}
    unit, scale = ("TFLOP/s", 1.0) if max(rates.values()) >= 1 else ("GFLOP/s", 1e3)
    text = f"{span([scale * rate for rate in rates.values()], unit)} in {plan.precision}"
    gpu = known_gpu(plan.world.gpu)
    if gpu:
        part = max(rates.values()) / gpu.peak_tflops(plan.precision)
        text += f", at most {part:.0%} of the datasheet's"
    late = slow(rates)
    if not late:
        return Row("matmul rate", "ok", text)
    worst = min(late, key=lambda rank: rates[rank])
    return Row(
        "matmul rate",
        "warn",
        f"{text}; slow: {who(late, hosts)}, down to {scale * rates[worst]:.1f}",
        "every step waits for the slowest: look for throttled clocks, heat and other processes "
        "there, or leave the node out (--exclude)",
    )


def _memory(plan: Plan, machines: Machines, hosts: Sequence[str]) -> Row:
    host = [m.host_free_bytes / GIB for m in machines.values() if m.host_free_bytes]
    free = span(host, "GiB of host memory free", ".0f") if host else "host memory not told"
    if plan.estimate is None:
        return Row("memory", "ok", f"not estimated for this architecture; {free}")
    texts = [(rank, text) for rank, machine in machines.items() for text in machine.shortages]
    short = by_text((rank, text.partition(", but ")[0]) for rank, text in texts)
    text = f"{memory_line(plan.estimate)}; {free}"
    if not short:
        return Row("memory", "ok", text)
    advice = texts[0][1].partition(": ")[2]
    text = f"{grouped(short, hosts)}, and less is free; {free}"
    return Row("memory", "warn" if plan.config.plan.force else "FAIL", text, advice)


def _step(plan: Plan, rates: Mapping[str, Any]) -> list[Row]:
    """The predicted time of a step with the rates that were measured, on GPUs that are known."""
    step = step_time(plan, rates)
    return [] if step is None else [Row("time of a step", "ok", step_line(step))]


def _shared_memory(machines: Machines, hosts: Sequence[str]) -> Row:
    free = {r: m.shared_free_bytes for r, m in machines.items() if m.shared_free_bytes is not None}
    if not free:
        return Row("/dev/shm", "warn", "cannot be read", "mount it: NCCL's ranks meet there")
    text = span((size / GIB for size in free.values()), "GiB free")
    few = [r for r, size in free.items() if size < SHARED_BYTES_PER_RANK * hosts.count(hosts[r])]
    if not few:
        return Row("/dev/shm", "ok", text)
    todo = "give the node 1 GiB for each of its ranks (in a container --shm-size)"
    return Row("/dev/shm", "warn", f"{text}; little on {who(few, hosts)}", todo)


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
    return Row("memlock", "warn", f"{text} on {who(pins, hosts)}", todo)


def _open_files(machines: Machines, hosts: Sequence[str]) -> Row:
    needed = _OWN_FILES + _FILES_PER_PEER * len(hosts)
    limits = {rank: machine.open_files for rank, machine in machines.items()}
    text = f"{span(limits.values(), 'allowed', 'd')}, about {needed} needed"
    few = [rank for rank, limit in limits.items() if limit < needed]
    if not few:
        return Row("open files", "ok", text)
    todo = f"`ulimit -n {needed}` or more in slurm/site.env: a socket leads to every other rank"
    return Row("open files", "warn", f"{text}; too few on {who(few, hosts)}", todo)
