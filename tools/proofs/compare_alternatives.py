"""Train twenty steps with the harness and with others: curves, and resumes on one rank.

    python tools/proofs/compare_alternatives.py --folder FOLDER

The same weights, batches and AdamW, two CPU ranks, fp32: the harness under ZeRO 2; FSDP 2 through
`accelerate launch`; the Trainer of transformers with DeepSpeed's ZeRO 2. Each saves after ten
steps and is resumed there by one rank alone. What fails is printed with its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from harness.runfolder import RunFolder
from tools.proofs.ranks import ON_CPU, python_path, started

_HERE = Path(__file__).with_name("alternatives")
_STEPS, _SAVED, _BATCH = 20, 10, 8
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
_ARGUMENTS = (
    "data.seq_len=64",
    "data.vocab_size=512",
    f"train.global_batch={_BATCH}",
    "train.micro_batch=4",
    f"train.steps={_STEPS}",
    f"save.every={_SAVED}",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    *(f"optim.{name}={value}" for name, value in _ADAM.items() if name != "betas"),
    f"optim.betas={_ADAM['betas']}",
    "optim.clip_norm=1.0",
    "eval.samples=1",
    "sample.tokens=0",
    "save.export=false",
    "log.every=1",
    "log.report=false",
    "ds.bf16.enabled=false",
    "ds.zero_optimization.reduce_bucket_size=1000000",
)


def main() -> int:
    """Command line -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, for all files")
    parser.add_argument("--only", nargs="+", choices=_OTHERS, default=[*_OTHERS])
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    weights, batches = _prepare(folder)
    curves = {"harness": _harness(folder, weights)}
    for name in args.only:
        curves[name] = _other(name, folder, weights, batches)
    whole = curves["harness"][0]
    for name, (on_two, on_one) in curves.items():
        print(f"{name:8} {_apart(on_two, whole)} on two ranks;", end=" ")
        print(f"resumed by one: {_apart(on_one, whole[_SAVED:])}")
    (folder / "curves.json").write_text(json.dumps(curves))
    return 0


def _prepare(folder: Path) -> tuple[Path, Path]:
    """Write the model, its weights as the harness exports them, and its batches."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(MODEL))
    first = folder / "first"
    _train(1, f"model.name={config}", *_ARGUMENTS, f"run.dir={first}", "train.steps=0",
           "save.export=true")  # fmt: skip
    plan = plan_from(parse_command([f"model.name={config}", *_ARGUMENTS]), world=World())
    batch = build_data(DataSpec.of_run(plan.config, plan.model_config)).train.batch(
        0, _STEPS * _BATCH
    )
    path = folder / "batches.npy"
    np.save(path, np.stack([batch.input_ids.numpy(), batch.labels.numpy()]))
    return first / "export", path


def _harness(folder: Path, weights: Path) -> tuple[Any, Any]:
    """Return the losses of two ranks, and of one that goes on from their checkpoint."""
    two, one = folder / "two", folder / "one"
    arguments = (f"model.name={folder / 'config.json'}", *_ARGUMENTS)
    _train(2, *arguments, f"model.init_from={weights}", f"run.dir={two}")
    _train(1, *arguments, f"resume.from={two}@{_SAVED}", f"run.dir={one}")
    return _losses(two), _losses(one)[-(_STEPS - _SAVED) :]


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(run).read_metrics() if "loss" in line]


def _train(ranks: int, *arguments: str) -> None:
    config = REPOSITORY / "ds_configs" / "zero2.json"
    command = [sys.executable, "harness/train.py", "--deepspeed", str(config), *arguments]
    with started(command, ranks, cwd=REPOSITORY) as group:
        if any(codes := group.wait()):
            raise SystemExit(f"the harness ended with {codes}")


def _fsdp(ranks: int, job: Path) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    return [*launch, str(_HERE / "fsdp.yaml"), "--num_processes", str(ranks),
            str(_HERE / "fsdp.py"), str(job)]  # fmt: skip


def _trainer(ranks: int, job: Path) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    return [*launch, str(ranks), "-m", "tools.proofs.alternatives.trainer", str(job)]


_OTHERS = {"fsdp": _fsdp, "trainer": _trainer}


def _other(name: str, folder: Path, weights: Path, batches: Path) -> tuple[Any, Any]:
    """Return the losses, or the last line of what failed, of two ranks and of one that resumes."""
    checkpoint = folder / f"{name}-saved"
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
    }
    results: list[Any] = []
    for ranks, first, last in ((2, 0, _STEPS), (1, _SAVED, _STEPS)):
        out = folder / f"{name}-{ranks}.json"
        saved = checkpoint if name == "fsdp" else checkpoint / f"checkpoint-{_SAVED}"
        job = {
            "weights": str(weights), "batches": str(batches), "adam": _ADAM, "clip": 1.0,
            "batch": _BATCH, "ranks": ranks, "first": first, "last": last,
            "save": 0 if first else _SAVED, "checkpoint": str(checkpoint),
            "resume": str(saved) if first else "", "out": str(out), "deepspeed": deepspeed,
        }  # fmt: skip
        path = folder / f"{name}-{ranks}-job.json"
        path.write_text(json.dumps(job))
        done = subprocess.run(
            _OTHERS[name](ranks, path),
            cwd=REPOSITORY,
            env={**os.environ, **ON_CPU, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH"))},
            capture_output=True,
            text=True,
        )
        (folder / f"{name}-{ranks}.log").write_text(done.stdout + done.stderr)
        results.append(json.loads(out.read_text()) if not done.returncode else _why(done.stderr))
    return results[0], results[1]


def _why(output: str) -> str:
    """Return the first line that names an exception."""
    lines = [line for line in output.splitlines() if re.search(r"(Error|Exception): ", line)]
    return lines[0][-300:] if lines else output[-300:]


def _apart(losses: Sequence[float] | str, others: Sequence[float]) -> str:
    if isinstance(losses, str):
        return f"failed: {losses}"
    if len(losses) != len(others):
        return f"{len(losses)} losses instead of {len(others)}"
    most = max(abs(a - b) / b for a, b in zip(losses, others, strict=True))
    return f"{losses[0]:.4f} to {losses[-1]:.4f}, {most:.1e} apart at most"


if __name__ == "__main__":
    sys.exit(main())
