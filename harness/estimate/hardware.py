"""GPUs by name: memory, compute peaks, and link bandwidth."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Gpu:
    """One device as PyTorch sees it: a table of gpus.toml, which documents each figure."""

    key: str
    """Its table in gpus.toml."""
    name: str
    memory_gib: float
    fp32_tflops: float
    fp16_tflops: float
    link_gb_per_s: float
    source: str
    must: str
    may: str
    typed: str | None = None
    """Its name on command lines, if that is not the key."""
    bf16_tflops: float | None = None
    float8: bool = False

    def peak_tflops(self, precision: Precision) -> float:
        """Return the peak of dense matrix products in `precision`, in 10**12 operations per second.

        A device without bf16 emulates it in fp32, so its peak is that of fp32.
        """
        if precision == "fp16":
            return self.fp16_tflops
        if precision == "bf16" and self.bf16_tflops is not None:
            return self.bf16_tflops
        return self.fp32_tflops


_TABLES = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
GPUS: dict[str, Gpu] = {key: Gpu(key, **table) for key, table in _TABLES.items()}
_COMMON_WORDS = {"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "gb", "gpu"}


def find_gpu(name: str) -> Gpu:
    """Return the GPU that a person or a driver calls `name`: "h100-80", "NVIDIA A100-SXM4-80GB".

    Raises ValueError with the known keys, or the keys that it could mean.
    """
    words = set(re.findall(r"rtx|[a-z]+\d+[a-z]*|\d+|[a-z]+", name.lower()))
    if "mig" in words:
        raise ValueError(f"unknown GPU {name!r}: it is a MIG slice of unknown size")
    matching = [
        key
        for key, gpu in GPUS.items()
        if (must := {*gpu.must.split()}) <= words <= must | {*gpu.may.split()} | _COMMON_WORDS
    ]
    if len(matching) == 1:
        return GPUS[matching[0]]
    names = ", ".join(GPUS[key].typed or key for key in matching or GPUS)
    raise ValueError(f"unknown GPU {name!r}: it must be one of {names}")


def half_precision(gpu: str | None) -> Literal["bf16", "fp16"]:
    """Return the half precision that a GPU's matrix units have; bf16 for an unknown GPU."""
    device = known_gpu(gpu)
    return "bf16" if device is None or device.bf16_tflops is not None else "fp16"


def known_gpu(name: str | None) -> Gpu | None:
    """Return the GPU with that name; None without a name or if the table lacks it."""
    try:
        return find_gpu(name) if name else None
    except ValueError:
        return None
