"""A case in processes of its own: one that runs out of memory ends alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.speed.cases import Case

REPOSITORY = Path(__file__).resolve().parents[2]


def measured(case: Case, deepspeed: Path, ranks: int, warmup: int, steps: int) -> dict[str, Any]:
    """Return the report of tools/speed/worker.py, or its end under `refused` or `error`.

    One micro-batch a step on each of `ranks` unless the case says otherwise.
    """
    settings = {"train.global_batch": _one_step(case, ranks), **case.settings}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "found.json")
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tools.speed.worker", f"--deepspeed={deepspeed.resolve()}"]
        command += [f"--warmup={warmup}", f"--steps={steps}", f"--out={out}"]
        command += [f"{key}={value}" for key, value in settings.items()]
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if done.returncode and "error" not in report:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        report["error"] = f"ended with code {done.returncode}: {last}"
    report.pop("rank", None)
    return report


def _one_step(case: Case, ranks: int) -> str:
    micro_batch = case.settings["train.micro_batch"]
    return str(int(micro_batch) * ranks) if micro_batch.isdecimal() else micro_batch
