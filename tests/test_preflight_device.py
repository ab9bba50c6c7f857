"""The preflight measures a device, queries its driver, and judges the answers."""

import fcntl
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tables import beside
from tools.preflight_checks import machine as checks

TABLES = beside(__file__, "preflight_device.toml")


def fake_nvml(**answers: Any) -> SimpleNamespace:
    """Return the NVML of a healthy GPU, changed by `answers`: values or exceptions."""

    class NVMLError(Exception):
        pass

    def field(value: int, code: int = 0) -> SimpleNamespace:
        return SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=value))

    healthy: dict[str, Any] = {
        **TABLES["healthy"],
        "nvmlDeviceGetPciInfo": SimpleNamespace(domain=0, bus=6, device=0),
        "nvmlDeviceGetFieldValues": [field(0), field(0), field(1, code=3)],  # 3: not supported
    }
    assert answers.keys() <= healthy.keys()
    answered = {**healthy, **answers}
    if isinstance(number := answered["nvmlDeviceGetFieldValues"], int):
        answered["nvmlDeviceGetFieldValues"] = [field(number)]

    def function(answer: Any) -> Any:
        def called(*_: Any) -> Any:
            if answer is Exception:
                raise NVMLError("planted")
            return answer

        return called

    functions = {name: function(answer) for name, answer in answered.items()}
    return SimpleNamespace(NVMLError=NVMLError, **TABLES["constants"], **functions)


def asked(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> checks.Driver:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**answers))
    return checks.ask_driver("GPU-0")


def test_preflight_queries_the_gpu_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    ecc = "Enabled, 0 uncorrected errors"
    expected = checks.Driver("550.127.05", "12.4", "0000:06:00", 16, ecc)
    assert asked(monkeypatch) == expected
    starts = ("nvmlDeviceGet", "nvmlSystem")
    names = [name for name in vars(fake_nvml()) if name.startswith(starts)]
    silent = {name: Exception for name in names if not name.endswith("HandleByUUID")}
    assert asked(monkeypatch, **silent) == checks.Driver()


def test_pynvml_has_every_function_used() -> None:
    nvml = pytest.importorskip("pynvml")
    assert [name for name in vars(fake_nvml()) if not hasattr(nvml, name)] == []


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        *TABLES["problems"],
        ({"nvmlInit": Exception}, "not checked, the driver does not answer: planted"),
    ],
)
def test_faults_of_a_gpu_are_named(answers: dict[str, Any], problem: str, monkeypatch) -> None:
    assert asked(monkeypatch, **answers).problems == (problem,)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (problem,) = checks.ask_driver("GPU-0").problems
    assert "pip install nvidia-ml-py" in problem


def test_errors_in_the_kernels_log_are_counted_for_the_gpu_alone() -> None:
    log = """
[12.3] NVRM: Xid (PCI:0000:0A:00): 79, pid=1, name=python, GPU has fallen off the bus.
[12.4] NVRM: Xid (PCI:0000:0A:00): 79, pid=1, name=python, GPU has fallen off the bus.
[12.5] NVRM: Xid (PCI:0000:07:00): 94, pid=2, name=python, Contained ECC error.
"""
    assert checks.parse_xids(log, "0000:0a:00") == ["Xid 79 (2 times)"]
    assert checks.parse_xids(log, None) == ["Xid 79 (2 times)", "Xid 94 (1 times)"]
    assert checks.parse_xids("", "0000:0a:00") == []


@pytest.mark.parametrize(("driver", "torchs", "nvcc", "problem"), TABLES["versions"])
def test_cuda_versions_fit(driver: str | None, torchs: str, nvcc: str | None, problem: str) -> None:
    assert checks.toolkit_problem(driver, torchs, nvcc).startswith(problem)
    assert bool(checks.toolkit_problem(driver, torchs, nvcc)) == bool(problem)


def test_a_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.lock_problem(tmp_path) == ""

    def unsupported(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert checks.lock_problem(tmp_path) == f"{tmp_path}: Function not implemented"


def test_operators_use_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "not" / "yet"))
    assert checks.extension_folder() == tmp_path


def test_exact_products_are_one_number_whoever_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    digest, steady = checks.exact_products(device)
    assert steady
    monkeypatch.setattr(checks, "_REPEATS", 1)
    assert checks.exact_products(device) == (digest, True)
    multiply, errors = torch.Tensor.__matmul__, iter([1, 1, 1, 0])

    def wrong_at_times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = multiply(a, b)
        result[3, 4] += next(errors)
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_at_times)
    other, steady = checks.exact_products(device)
    assert steady
    assert other != digest
    assert checks.exact_products(device) == (other, False)
