"""The preflight looks at a device: the output of NVIDIA's tools is read, and judged."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.preflight_checks import device as checks
from tools.preflight_checks.device import Device, device_rows

HOSTS = ["n1", "n2"]
# A part of `nvidia-smi -q -i ...`, in the form of driver 550.
QUERY = """
==============NVSMI LOG==============

Timestamp                                 : Mon Jun  2 10:00:00 2025
Driver Version                            : 550.127.05
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:06:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Reset Status
        Reset Required                    : No
        Drain and Reset Recommended       : No
    PCI
        Bus                               : 0x06
        Bus Id                            : 00000000:06:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 5
            Link Width
                Max                       : 16x
                Current                   : 16x
        Replays Since Reset               : 0
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
        SW Thermal Slowdown               : Not Active
    Remapped Rows
        Correctable Error                 : 0
        Pending                           : No
        Remapping Failure Occurred        : No
    Clocks
        SM                                : 1980 MHz
    Processes                             : None
"""
GPU = Device("abc", toolkit="driver 550", links="PCIe 16x")


def test_the_drivers_report_is_read_by_path() -> None:
    said = checks.parse_query(QUERY)
    assert said["CUDA Version"] == "12.4"
    assert said["PCI/Bus Id"] == "00000000:06:00.0"
    assert said["PCI/GPU Link Info/Link Width/Current"] == "16x"
    assert said["Clocks Event Reasons/HW Slowdown"] == "Not Active"
    assert said["Remapped Rows/Pending"] == "No"
    assert said["Clocks/SM"] == "1980 MHz"
    assert checks.unhealthy(said) == []
    assert checks.parse_query("") == {}


@pytest.mark.parametrize(
    ("line", "changed", "problem"),
    [
        ("Pending                           : No", "Yes", "Pending: Yes"),
        ("Remapping Failure Occurred        : No", "Yes", "Remapping Failure Occurred: Yes"),
        ("HW Slowdown                       : Not Active", "Active", "HW Slowdown: Active"),
        ("Reset Required                    : No", "Yes", "Reset Required: Yes"),
        ("Current                   : 16x", "8x", "PCIe link is 8x wide of 16x"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_named(line: str, changed: str, problem: str) -> None:
    assert QUERY.count(line) == 1
    text = QUERY.replace(line, f"{line.partition(': ')[0]}: {changed}")
    assert checks.unhealthy(checks.parse_query(text)) == [problem]


def test_errors_in_the_kernels_log_are_counted_for_the_gpu_alone() -> None:
    log = """
[12.3] NVRM: Xid (PCI:0000:06:00): 79, pid=1, name=python, GPU has fallen off the bus.
[12.4] NVRM: Xid (PCI:0000:06:00): 79, pid=1, name=python, GPU has fallen off the bus.
[12.5] NVRM: Xid (PCI:0000:07:00): 94, pid=2, name=python, Contained ECC error.
"""
    assert checks.parse_xids(log, "00000000:06:00.0") == ["Xid 79 (2 times)"]
    assert checks.parse_xids(log, None) == ["Xid 79 (2 times)", "Xid 94 (1 times)"]
    assert checks.parse_xids("", "00000000:06:00.0") == []


@pytest.mark.parametrize(
    ("driver", "torchs", "nvcc", "problem"),
    [
        ("12.4", "12.8", "12.6", ""),  # of one major version
        ("13.0", "12.8", None, ""),
        ("12.4", "13.0", None, "the driver is of CUDA 12.4, torch of 13.0"),
        ("13.0", "13.0", "12.8", "nvcc is of CUDA 12.8, torch of 13.0"),
        (None, "13.0", None, ""),
    ],
)
def test_versions_of_cuda_must_fit(
    driver: str | None, torchs: str, nvcc: str | None, problem: str
) -> None:
    assert checks.toolkit_problem(driver, torchs, nvcc).startswith(problem)
    assert bool(checks.toolkit_problem(driver, torchs, nvcc)) == bool(problem)


def test_the_release_of_nvcc_is_read() -> None:
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93"
    assert checks.nvcc_release(text) == "12.8"
    assert checks.nvcc_release("") is None


def test_a_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.lock_problem(tmp_path) == ""

    def unsupported(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert checks.lock_problem(tmp_path) == f"{tmp_path}: Function not implemented"


def test_operators_are_built_in_the_nearest_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "not" / "yet"))
    assert checks.extension_folder() == tmp_path


def test_exact_products_are_one_number_whoever_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    digest, steady = checks.exact_products(device)
    assert steady
    monkeypatch.setattr(checks, "_REPEATS", 1)
    assert checks.exact_products(device) == (digest, True)
    multiply = torch.Tensor.__matmul__

    def wrong_at_times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = multiply(a, b)
        result[3, 4] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_at_times)
    other, steady = checks.exact_products(device)
    assert steady
    assert other != digest


def rows(on_cuda: bool = True, **changes: Any) -> dict[str, tuple[str, str]]:
    devices = {0: GPU, 1: replace(GPU, **changes)}
    return {row.check: (row.verdict, row.found) for row in device_rows(devices, HOSTS, on_cuda)}


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "text"),
    [
        ({"checksum": "xyz"}, "matmul checksum", "FAIL", "n2 (rank 1): xyz; all others: abc"),
        ({"steady": False}, "matmul checksum", "FAIL", "n2 (rank 1): another one each time"),
        ({"locks": "/home: no"}, "build locks", "warn", "n2 (rank 1): /home: no"),
        ({"toolkit": "driver 535"}, "CUDA versions", "warn", "n2 (rank 1): driver 535"),
        ({"toolkit_problem": "old"}, "CUDA versions", "warn", "n2 (rank 1): old"),
        ({"health": "Pending: Yes"}, "GPU health", "warn", "n2 (rank 1): Pending: Yes"),
        ({"links": "PCIe 8x"}, "GPU links", "warn", "n2 (rank 1): PCIe 8x"),
    ],
)
def test_the_rank_that_differs_is_named(
    changes: dict[str, Any], check: str, verdict: str, text: str
) -> None:
    found = rows(**changes)
    assert found[check][0] == verdict
    assert text in found[check][1]
    assert [name for name, (how, _) in found.items() if how != "ok"] == [check]


def test_without_cuda_there_are_products_and_locks() -> None:
    assert [*rows(on_cuda=False)] == ["matmul checksum", "build locks"]
