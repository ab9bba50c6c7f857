"""The winner, ready to run: DeepSpeed JSON, run config, commands."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from pathlib import Path

from harness.plan.model_config import PRESETS, preset_names
from tools.cluster.layouts import Layout


def settings(args: argparse.Namespace, layout: Layout) -> dict[str, object]:
    """Return the run config's keys of a layout."""
    keys: dict[str, object] = {
        "model.name": args.model,
        "data.seq_len": args.seq_len,
        "train.global_batch": args.global_batch,
        **layout.overrides,
    }
    if args.lora:
        keys |= {"model.lora.rank": args.lora, "model.init_from": _weights_of(args.model)}
        del keys["model.name"]  # that of its weights
    if args.quantize:
        keys["model.lora.quantize"] = args.quantize
    return keys


def _weights_of(model: str) -> str:
    """Return the folder of a model's weights or their name on the hub, which a preset has."""
    if model not in preset_names():
        return model
    source = tomllib.loads((PRESETS / f"{model}.toml").read_text(encoding="utf-8"))["source"]
    on_hub = re.match(r"https://huggingface\.co/([^/ ]+/[^/ ]+)", source)
    return on_hub[1] if on_hub else model


def commands(args: argparse.Namespace, layout: Layout, ds: str, run: str) -> list[str]:
    """Return the commands that plan and submit a layout."""
    own = " ".join(map(shlex.quote, args.assignments))
    rest = f"--deepspeed {shlex.quote(ds)} --config {shlex.quote(run)}{' ' + own if own else ''}"
    per_node = min(args.gpus_per_node or 8, args.gpus)
    nodes = args.gpus // per_node
    train = f"deepspeed --num_gpus {per_node} harness/train.py {rest}"
    slurm = f"sbatch --nodes={nodes} --gpus-per-node={per_node} slurm/train.sbatch {rest}"
    return [train, slurm] if nodes == 1 else [slurm]


def write_job(folder: Path, args: argparse.Namespace, layout: Layout) -> list[str]:
    """Write ds.json, run.toml and job.sh into a folder, and return lines that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    ds, run, script = folder / "ds.json", folder / "run.toml", folder / "job.sh"
    ds.write_text(json.dumps(layout.deepspeed, indent=2) + "\n")
    lines = (f"{key} = {json.dumps(value)}" for key, value in settings(args, layout).items())
    run.write_text("\n".join(lines) + "\n")
    script.write_text("\n".join(commands(args, layout, str(ds), str(run))) + "\n")
    return [f"written: {ds}, {run}, {script}"]
