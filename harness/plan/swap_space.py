"""Checks that this machine can offload optimizer states to NVMe, before a device is used."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness.config.ds_keys import literal, offloaded_to
from harness.estimate.units import GIB
from harness.plan.plan import Plan

_KEY = "zero_optimization.offload_optimizer"
_USES_AIO = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"


def swap_problems(plan: Plan) -> list[str]:
    """Return the problems of this machine with offloading to NVMe; none for a run that does not."""
    if offloaded_to(plan.deepspeed, "optimizer") != "nvme":
        return []
    folder = Path(str(literal(plan.deepspeed, f"{_KEY}.nvme_path")))
    needed = plan.estimate.nvme_bytes_per_node if plan.estimate else 0
    return [*_wrong_folder(folder, needed), *libaio_problems()]


def _wrong_folder(folder: Path, needed: int) -> list[str]:
    elsewhere = f"set ds.{_KEY}.nvme_path to a folder on a local drive"
    if not folder.is_dir():
        return [f"{_KEY}.nvme_path is {folder}, which is no folder here: {elsewhere}"]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"{_KEY}.nvme_path is {folder}, where this user may not write: {elsewhere}"]
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [
        f"the optimizer's files need {needed / GIB:.2f} GiB of {folder}, but {free / GIB:.2f} GiB "
        f"are free ({_KEY}.nvme_path): make room, use more nodes, or {elsewhere}"
    ]


def libaio_problems() -> list[str]:
    """Return a problem if libaio, which DeepSpeed's NVMe code is built with, is missing."""
    command = [os.environ.get("CXX", "c++"), "-x", "c++", "-", "-laio", "-o", os.devnull]
    try:
        done = subprocess.run(command, input=_USES_AIO, capture_output=True, text=True)
    except OSError:
        return [f"{_KEY}.device is 'nvme', which needs a C++ compiler: apt install g++"]
    if done.returncode == 0:
        return []
    return [
        f"{_KEY}.device is 'nvme', which needs libaio and its header: apt install libaio-dev, or "
        "dnf install libaio-devel; or offload to the cpu"
    ]
