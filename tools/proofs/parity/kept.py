"""The plain loop's spread, measured once per kind of machine."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from tools.made_with import machine, versions
from tools.proofs.parity.measure import Difference
from tools.proofs.parity.model import Way
from tools.proofs.parity.spread import distance, orders_of

FOLDER = Path(__file__).resolve().parents[3] / "build" / "spread"


def kept_spreads(way: Way) -> Iterator[Difference]:
    """Yield the spreads of `way` as `spreads` does, from earlier measurements on a machine of this
    kind, by the same code and packages, where there are any.
    """
    path = FOLDER / f"{_kind(way.device)}-{_digest(json.dumps(asdict(way)))}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(orders_of(way)):
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # gate and self-test run side by side
            kept = json.loads(path.read_text()) if path.exists() else []
            if len(kept) == number:
                kept.append(asdict(distance(way, number)))
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(kept))
                partial.replace(path)
        yield Difference.largest([Difference(**values) for values in kept[: number + 1]])


@functools.cache
def _kind(device: str) -> str:
    """Name everything that rounding depends on: the processor, the kernels, the packages, us."""
    here = Path(__file__).parent
    files = [here.parent / "cells.py", here.parent / "models.py", *sorted(here.glob("*.py"))]
    source = b"".join(path.read_bytes() for path in files)
    environment = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ROUNDING))
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    parts = (machine(), versions(), torch.backends.cpu.get_cpu_capability(), gpu, *environment)
    return _digest("".join(parts), source)


_ROUNDING = ("ATEN_", "CUBLAS_", "MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_")


def _digest(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()[:16]
