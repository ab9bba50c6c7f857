"""The job's files: weights exported by the harness, the resolved JSON, batches in its order."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.cpp_extension import get_default_build_root

from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.engine.allocators import MALLOC_VARIABLES
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from tools.proofs.overhead.job import ACCUMULATED, LEARNED, MODEL, REPOSITORY, Job
from tools.proofs.overhead.suspects import Suspect
from tools.proofs.overhead.turns import Length, Start, waiting_start
from tools.proofs.ranks import ON_CPU

_USUAL = Suspect()


@dataclass(frozen=True)
class Bench:
    """Files and data that all processes share."""

    folder: Path
    data: Data
    arguments: tuple[str, ...]

    @contextlib.contextmanager
    def start(
        self,
        side: str,
        stage: int,
        ranks: int,
        length: Length,
        suspect: Suspect = _USUAL,
        under: Sequence[str] = (),
    ) -> Iterator[Start]:
        """Start one side now, with `suspect` switched; it has warmed up and waits for its turn.

        `under`: a command that runs each rank's. No process outlives the block. Raises SystemExit
        with the failure.
        """
        require_no_lock()
        out = self.folder / f"{side}-{time.monotonic_ns()}"
        out.mkdir()
        arguments = (
            *self.arguments,
            *suspect.arguments,
            f"train.global_batch={ACCUMULATED * ranks}",
        )
        json_file = REPOSITORY / "ds_configs" / f"zero{stage}.json"
        steps = length.all_steps
        socket_path = out / "turns"
        job = Job(
            weights=str(weights_of(self.folder)),
            ds_given=str(json_file),
            ds_resolved=str(_resolved(out, json_file, arguments, ranks)),
            batches=str(self._batches(out, steps * ACCUMULATED * ranks)),
            arguments=(*arguments, f"run.dir={out / 'run'}"),
            ranks=ranks,
            warm_up=length.warm_up,
            steps=steps,
            socket_path=str(socket_path),
            out=str(out),
            frozen=suspect.frozen,
            unevaluated=suspect.unevaluated,
            began=time.monotonic(),
        )
        # No setting of malloc that this process has may reach one side and not the other.
        unset = dict.fromkeys(MALLOC_VARIABLES)
        environment = {**ON_CPU, **unset, **suspect.environment_of(side)}
        module = "tools.proofs.overhead.side"
        command = [*under, sys.executable, "-m", module, side, str(job.write())]
        with waiting_start(command, ranks, out, socket_path, environment) as waiting:
            yield waiting

    def _batches(self, out: Path, samples: int) -> Path:
        batch = self.data.train.batch(0, samples)
        path = out / "batches.npy"
        np.save(path, np.stack([batch.input_ids.numpy(), batch.labels.numpy()]))
        return path


def _resolved(out: Path, json_file: Path, arguments: tuple[str, ...], ranks: int) -> Path:
    command = parse_command(["--deepspeed", str(json_file), *arguments])
    plan = plan_from(command, world=World(world_size=ranks, local_world_size=ranks))
    path = out / "resolved.json"
    path.write_text(json.dumps(plan.deepspeed))
    return path


def prepare(folder: Path, layers: int) -> Bench:
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
    return Bench(folder, data, arguments)


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
