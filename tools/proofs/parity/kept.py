"""The plain loop's spread, measured once per kind of machine."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from tools.made_with import machine, versions
from tools.proofs.parity.measure import Difference
from tools.proofs.parity.reference import Way, spread

FOLDER = Path(__file__).resolve().parents[3] / "build" / "spread"


def kept_spread(way: Way) -> Difference:
    """Return the spread of `way`, from an earlier measurement on a machine of this kind, by the
    same code and packages, where there is one.
    """
    path = FOLDER / f"{_kind()}-{_digest(json.dumps(asdict(way)))}.json"
    if path.exists():
        return Difference(**json.loads(path.read_text()))
    measured = spread(way)
    FOLDER.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(measured)))
    partial.replace(path)
    return measured


def _kind() -> str:
    """Name everything that rounding depends on: the processor, the kernels, the packages, us."""
    here = Path(__file__).parent
    files = [here.parent / "cells.py", here.parent / "models.py", *sorted(here.glob("*.py"))]
    source = b"".join(path.read_bytes() for path in files)
    environment = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ROUNDING))
    parts = (machine(), versions(), torch.backends.cpu.get_cpu_capability(), *environment)
    return _digest("".join(parts), source)


_ROUNDING = ("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_")


def _digest(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()[:16]
