"""One opening of a large corpus in a process of its own: FOLDER CASE build|cold|warm -> JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers

from tools.proofs.data_scale.corpus import Made
from tools.proofs.data_scale.readers import CASES, RESUMED_STEP, forget

_LIBRARIES = (torch, transformers)  # what every rank has loaded before it opens data
MIB = 1 << 20


def memory_mib(field: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) / 1024


def main(argv: list[str]) -> int:
    """Open, read the first batch, and read on at a late step, each timed."""
    folder, case, state = Path(argv[0]), argv[1], argv[2]
    (facts,) = folder.glob("corpus-*.json")
    made = Made(**json.loads(facts.read_text()))
    if state == "build":
        forget(case, folder)
    if state == "cold":
        drop_pages(folder)
    version = None
    if case == "Megatron-LM":
        import megatron.core.datasets.gpt_dataset

        version = megatron.core.__version__
    if case == "datatrove":
        import datatrove.utils.dataset  # noqa: F401
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, cpu = memory_mib("VmRSS"), time.process_time()
    began = time.perf_counter()
    begin = CASES[case](made, folder)
    opened = time.perf_counter()
    next(iter(begin(0)))
    first = time.perf_counter()
    next(iter(begin(RESUMED_STEP)))
    resumed = time.perf_counter()
    result = {
        "case": case,
        "state": state,
        "open_s": opened - began,
        "first_batch_s": first - opened,
        "resume_s": resumed - first,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": memory_mib("VmHWM") - before,
        "version": version,
        "private_mib": memory_mib("RssAnon"),
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # threads that read ahead


def drop_pages(folder: Path) -> None:
    """Take the files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
