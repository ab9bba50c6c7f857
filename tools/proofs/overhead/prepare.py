"""The job's files: weights exported by the harness, the resolved JSON, batches in its order."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.cpp_extension import get_default_build_root

from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from tools.proofs.overhead.job import ACCUMULATED, LEARNED, MODEL, REPOSITORY, Job
from tools.proofs.overhead.suspects import Suspect
from tools.proofs.ranks import ON_CPU, started

_USUAL = Suspect()


@dataclass(frozen=True)
class Bench:
    """Files and data that all processes share."""

    folder: Path
    data: Data
    arguments: tuple[str, ...]
    warm_up: int
    timed: int

    def measure(
        self, side: str, stage: int, ranks: int, counted: int, suspect: Suspect = _USUAL
    ) -> list[dict[str, Any]]:
        """Start one side now, with `suspect` switched; return each rank's measurements.

        `counted` is the number of steps under the counters. Raises SystemExit with the failure.
        """
        require_no_lock()
        out = self.folder / "process"
        out.mkdir(exist_ok=True)
        arguments = (
            *self.arguments,
            *suspect.arguments,
            f"train.global_batch={ACCUMULATED * ranks}",
        )
        json_file = REPOSITORY / "ds_configs" / f"zero{stage}.json"
        job = Job(
            weights=str(weights_of(self.folder)),
            ds_given=str(json_file),
            ds_resolved=str(self._resolved(json_file, arguments, ranks)),
            batches=str(self._batches((self.warm_up + self.timed + counted) * ACCUMULATED * ranks)),
            arguments=(*arguments, f"run.dir={out / f'run-{time.monotonic_ns()}'}"),
            ranks=ranks,
            warm_up=self.warm_up,
            timed=self.timed,
            counted=counted,
            out=str(out),
            frozen=suspect.frozen,
            unevaluated=suspect.unevaluated,
            began=time.monotonic(),
        )
        environment = {**ON_CPU, **suspect.environment}
        command = [sys.executable, "-m", "tools.proofs.overhead.side", side, str(job.write())]
        with started(command, ranks, logs=out, env=environment) as group:
            codes = group.wait()
        if any(codes):
            texts = [path.read_text() for path in sorted(out.glob("*.error"))]
            raise SystemExit("\n".join(texts) or f"{side} ended with {codes}")
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    def _resolved(self, json_file: Path, arguments: tuple[str, ...], ranks: int) -> Path:
        command = parse_command(["--deepspeed", str(json_file), *arguments])
        plan = plan_from(command, world=World(world_size=ranks, local_world_size=ranks))
        path = self.folder / "resolved.json"
        path.write_text(json.dumps(plan.deepspeed))
        return path

    def _batches(self, samples: int) -> Path:
        batch = self.data.train.batch(0, samples)
        path = self.folder / "batches.npy"
        np.save(path, np.stack([batch.input_ids.numpy(), batch.labels.numpy()]))
        return path


def prepare(folder: Path, layers: int, warm_up: int, timed: int) -> Bench:
    """Write what the sides begin with below `folder`. Raises SystemExit where that fails."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
    learned = (*LEARNED, f"model.name={config}")
    first = ("train.steps=0", "sample.tokens=0", f"run.dir={folder / 'first'}")
    done = subprocess.run(
        [sys.executable, "harness/train.py", *learned, *first],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    arguments = (*learned, "train.steps=100000", f"model.init_from={weights_of(folder)}")
    plan = plan_from(parse_command(list(arguments)), world=World())
    data = build_data(DataSpec.of_run(plan.config, plan.model_config))
    return Bench(folder, data, arguments, warm_up, timed)


def add_length(parser: argparse.ArgumentParser) -> None:
    """Add the steps of each process."""
    parser.add_argument("--steps", type=int, default=3, help="timed, in each process")
    # In its first three steps the harness also compares the memory it holds with the estimate.
    parser.add_argument("--warm-up", type=int, default=4, help="steps before, at least one")


def require_no_lock() -> None:
    """Raise SystemExit if an operator's folder holds a lock: without the harness torch waits for
    the file to vanish, and a build that was killed has left it for ever.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if locks := sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        raise SystemExit(
            f"{locks[0]} is there, for which bare DeepSpeed would wait: let that build end, or "
            "remove the file if it was killed"
        )


def weights_of(folder: Path) -> Path:
    """Return the folder to which `prepare` exported them."""
    return folder / "first" / "export"
