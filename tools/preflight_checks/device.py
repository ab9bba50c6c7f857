"""A rank's device and what drives it: exact products, CUDA's versions, health, links, locks."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.preflight_checks.report import Row, by_text, grouped, same_row

_EDGE = {"cuda": 4096, "cpu": 256}
_SPARSE = 64  # one factor of so many is not 0
_REPEATS = 8
_TOOL_S = 20.0  # how long a command may take to answer

# Of `nvidia-smi -q`: where it says so, the GPU is to be looked at.
_UNHEALTHY = {
    "GPU Reset Status/Reset Required": "Yes",
    "GPU Reset Status/Drain and Reset Recommended": "Yes",
    "Clocks Event Reasons/HW Slowdown": "Active",
    "Clocks Event Reasons/SW Thermal Slowdown": "Active",
    "Remapped Rows/Pending": "Yes",
    "Remapped Rows/Remapping Failure Occurred": "Yes",
}
_WIDTH = "PCI/GPU Link Info/Link Width"


@dataclass(frozen=True)
class Device:
    """One rank's device."""

    checksum: str
    """Of products of small whole numbers, whose sums are exact: the same on every device."""
    steady: bool = True
    """False if one of several such products differed from the first."""
    locks: str = ""
    """Why builds in the folder of compiled operators cannot be locked; "" if they can."""
    toolkit: str = ""
    """Versions of CUDA: the driver's, torch's, the compiler's."""
    toolkit_problem: str = ""
    health: str = ""
    """What the driver says is wrong with the GPU; "" if nothing."""
    links: str = ""
    """Its way to the GPUs of the node that this rank sees."""


def measure_device(device: torch.device) -> Device:
    """Look at this rank's device."""
    checksum, steady = exact_products(device)
    locks = lock_problem(extension_folder())
    if device.type != "cuda":
        return Device(checksum, steady, locks)
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    answer = parse_query(_output("nvidia-smi", "-q", "-i", uuid))
    nvcc = nvcc_release(_output(_nvcc(), "--version"))
    versions = (answer.get("CUDA Version"), torch.version.cuda, nvcc)
    xids = parse_xids(_output("dmesg"), answer.get("PCI/Bus Id"))
    return Device(
        checksum,
        steady,
        locks,
        f"driver {answer.get('Driver Version', 'unknown')} (CUDA {versions[0] or 'unknown'}), "
        f"torch's CUDA {versions[1]}, nvcc {versions[2] or 'not found'}",
        toolkit_problem(*versions),
        "; ".join([*unhealthy(answer), *xids]),
        _links(device, answer),
    )


def exact_products(device: torch.device) -> tuple[str, bool]:
    """Return a digest of a matrix product, and True if it comes out alike several times.

    Factors are -1, 0 and 1, few of them not 0: sums stay below 256 and are exact in bf16, in
    whatever order they are taken. A GPU that computes wrong without an error gives another digest
    than its neighbours.
    """
    edge = _EDGE[device.type]
    generator = torch.Generator().manual_seed(0)
    signs, sparse = (torch.randint(-1, 2, (edge, edge), generator=generator) for _ in range(2))
    sparse *= torch.randint(0, _SPARSE, (edge, edge), generator=generator) == 0
    a, b = (factor.to(torch.bfloat16).to(device) for factor in (signs, sparse))
    first = a @ b
    steady = all(torch.equal(a @ b, first) for _ in range(_REPEATS))
    digest = hashlib.sha256(first.cpu().to(torch.int32).numpy().tobytes())
    return digest.hexdigest()[:12], steady


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


def parse_query(text: str) -> dict[str, str]:
    """Return what `nvidia-smi -q` says of one GPU, by path: "Remapped Rows/Pending" -> "No"."""
    values: dict[str, str] = {}
    sections: list[tuple[int, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(" : ")
        depth, name = len(name) - len(name.lstrip()), name.strip()
        sections = [section for section in sections if section[0] < depth]
        if colon:
            values["/".join([*(title for _, title in sections), name])] = value.strip()
        elif name and depth:  # the GPU itself, at the margin, is no part of a path
            sections.append((depth, name))
    return values


def unhealthy(answer: Mapping[str, str]) -> list[str]:
    """Return what a GPU's driver says is wrong with it."""
    problems = [
        f"{path.rpartition('/')[2]}: {value}"
        for path, value in answer.items()
        if any(path.endswith(key) and value == bad for key, bad in _UNHEALTHY.items())
    ]
    width, most = (answer.get(f"{_WIDTH}/{name}") for name in ("Current", "Max"))
    if width != most and width and most:
        problems.append(f"PCIe link is {width} wide of {most}")
    return problems


def parse_xids(kernel_log: str, bus_id: str | None) -> list[str]:
    """Return the driver's errors in the kernel's log, of one GPU: "Xid 79 (2 times)"."""
    # The log has no function number: 0000:06:00 of 00000000:06:00.0.
    own = bus_id and bus_id.lower()[4:].partition(".")[0]
    listed = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", kernel_log)
    counts = Counter(number for bus, number in listed if own is None or bus.lower() == own)
    return [f"Xid {number} ({count} times)" for number, count in counts.items()]


def nvcc_release(text: str) -> str | None:
    """Return the release in the output of `nvcc --version`: "12.8"."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def toolkit_problem(driver: str | None, torchs: str | None, nvcc: str | None) -> str:
    """Return what does not fit together of three versions of CUDA; "" if all does.

    Within a major version programs of a newer toolkit run on an older driver (CUDA's minor version
    compatibility); what nvcc builds must be of torch's own major version.
    """
    major = [version and int(version.partition(".")[0]) for version in (driver, torchs, nvcc)]
    if major[0] and major[1] and major[0] < major[1]:
        return f"the driver is of CUDA {driver}, torch of {torchs}: it will find no GPU"
    if major[1] and major[2] and major[2] != major[1]:
        return f"nvcc is of CUDA {nvcc}, torch of {torchs}: operators that it builds may not load"
    return ""


def _nvcc() -> str:
    """Return torch's choice: CUDA_HOME's, then that of PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def _output(*command: str) -> str:
    """Return the output of a command; "" where it cannot be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _links(device: torch.device, answer: Mapping[str, str]) -> str:
    others = [n for n in range(torch.cuda.device_count()) if n != device.index]
    peers = sum(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    width = answer.get(f"{_WIDTH}/Max", "unknown")
    if not others:
        return f"PCIe {width}; sees no other GPU"
    return f"PCIe {width}; reaches the memory of {peers} of {len(others)} others directly"


# --- judged on rank 0 ---


def device_rows(devices: Mapping[int, Device], hosts: Sequence[str], on_cuda: bool) -> list[Row]:
    """The checks of all devices; `devices` by rank."""
    checksums = {
        rank: device.checksum if device.steady else "another one each time"
        for rank, device in devices.items()
    }
    todo = "that device computes wrong without an error: drain the node and have it tested"
    rows = [same_row("matmul checksum", checksums, hosts, todo), _locks(devices, hosts)]
    if not on_cuda:
        return rows
    return [*rows, _toolkit(devices, hosts), _health(devices, hosts), _ways(devices, hosts)]


def _locks(devices: Mapping[int, Device], hosts: Sequence[str]) -> Row:
    problems = by_text((rank, device.locks) for rank, device in devices.items() if device.locks)
    if not problems:
        return Row("build locks", "ok", "the folder of compiled operators takes locks")
    todo = "set TORCH_EXTENSIONS_DIR to a folder of the node: two ranks may build at once there"
    return Row("build locks", "warn", grouped(problems, hosts), todo)


def _toolkit(devices: Mapping[int, Device], hosts: Sequence[str]) -> Row:
    problems = [(rank, d.toolkit_problem) for rank, d in devices.items() if d.toolkit_problem]
    if problems:
        todo = "install torch for the driver's CUDA, or set CUDA_HOME to a toolkit of torch's"
        return Row("CUDA versions", "warn", grouped(by_text(problems), hosts), todo)
    versions = {rank: device.toolkit for rank, device in devices.items()}
    return same_row("CUDA versions", versions, hosts, "update the node that differs", "warn")


def _health(devices: Mapping[int, Device], hosts: Sequence[str]) -> Row:
    problems = by_text((rank, d.health) for rank, d in devices.items() if d.health)
    if not problems:
        return Row("GPU health", "ok", "no remapped rows pending, no slowdown, no reset required")
    todo = "see nvidia-smi -q and dmesg there; a reset mends pending rows, else drain the node"
    return Row("GPU health", "warn", grouped(problems, hosts), todo)


def _ways(devices: Mapping[int, Device], hosts: Sequence[str]) -> Row:
    links = {rank: device.links for rank, device in devices.items()}
    todo = "see nvidia-smi topo -m there: a GPU without peer access copies through the host"
    return same_row("GPU links", links, hosts, todo, "warn")
