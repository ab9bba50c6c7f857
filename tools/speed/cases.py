"""The timed cases; each runs in its own processes."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.launch.ranks import python_path, started

ALIASES = {"micro_batch": "train.micro_batch", "seq_len": "data.seq_len", "model": "model.name"}
"""Short key names for --sweep."""
LADDER: dict[str, dict[str, str | None]] = {
    "eager": {
        "model.attention": "eager",
        "ds.optimizer.params.fused": "false",
        "model.kernels": "none",
        "model.compile": "false",
    },
    "sdpa": {"model.attention": "sdpa"},
    "flash": {"model.attention": "flash_attention_2"},
    "fused optimizer": {"ds.optimizer.params.fused": None},
    "liger": {"model.kernels": "liger"},
    "compile": {"model.compile": "true"},
    "checkpointing": {"model.checkpointing": "full"},
}
"""Each rung adds to the earlier rungs that ran; None removes a key."""


@dataclass(frozen=True)
class Case:
    """One way to train: a name and its settings."""

    name: str
    settings: dict[str, str]

    def on_top(self, rung: str) -> Case:
        """Return this case with a rung of the ladder added."""
        changes = LADDER[rung]
        kept = {key: value for key, value in self.settings.items() if key not in changes}
        return Case(rung, kept | {key: value for key, value in changes.items() if value})


def swept(base: dict[str, str], sweeps: Iterable[str]) -> Iterator[Case]:
    """Yield every combination of `key=v1,v2,...`; without sweeps, only the base.

    Raises ValueError for a sweep without values.
    """
    axes = []
    for text in sweeps:
        key, _, values = text.partition("=")
        if not all(values.split(",")):
            raise ValueError(f"--sweep {text}: it must be KEY=VALUE,VALUE,...")
        axes.append([(ALIASES.get(key, key), value) for value in values.split(",")])
    for combination in itertools.product(*axes):
        name = " ".join(f"{key}={value}" for key, value in combination) or "base"
        yield Case(name, {**base, **dict(combination)})


LIMIT_S = 900.0
# A timed run only takes steps. plan.force: it is tried even if the estimate says it does not fit.
_TIMED = {
    "train.steps": "1000000",
    "log.every": "1000000",
    "eval.every": "0",
    "eval.samples": "1",
    "save.every": "0",
    "save.export": "false",
    "sample.tokens": "0",
    "plan.force": "true",
}


def measured(
    case: Case,
    deepspeed: Path,
    ranks: int,
    warmup: int,
    steps: int,
    limit_s: float = LIMIT_S,
    env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the report of tools/speed/worker.py; a failure is under `refused` or `error`.

    A step is one micro-batch on each of `ranks` unless the case says otherwise. `env` adds to the
    environment.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "found.json")
        step = case.settings["train.micro_batch"]
        step = str(int(step) * ranks) if step.isdecimal() else step
        own = {"train.global_batch": step, "run.dir": f"{scratch}/run"}
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tools.speed.worker", f"--deepspeed={deepspeed}"]
        command += [f"--warmup={warmup}", f"--steps={steps}", f"--out={out}"]
        command += [f"{key}={value}" for key, value in {**_TIMED, **own, **case.settings}.items()]
        # Relative paths are the caller's; a `tools` or `harness` there is not this repository's.
        path = python_path(os.environ.get("PYTHONPATH"))
        own_code = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        with started(command, None, Path.cwd(), Path(scratch), {**own_code, **env}) as group:
            ended = group.wait(limit_s)
        report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    (code,), last = ended.codes, ended.last_line or "no output"
    if code is None:
        report["error"] = f"not finished after {limit_s:g} s: {last}"
    elif code and "error" not in report:
        report["error"] = f"ended with code {code}: {last}"
    report.pop("rank", None)
    return report
