"""Writes the recommended layout ready to run: DeepSpeed JSON, run config, launcher scripts."""

import argparse
import json
import shlex
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from harness.config.assignments import value_as_text
from harness.config.run_config import RunConfig, known_keys
from harness.estimate.step_time.job import DAY
from harness.files.paths import REPOSITORY, script
from harness.plan.machine import USUAL_NODE
from tools.cluster.ask import plan_of, weights_of
from tools.cluster.count import Counted

_KUBERNETES = REPOSITORY / "slurm/containers/kubernetes.yaml"
_SHELL = """#!/bin/bash
# {about}
# Run it{how}; more key=value may follow. Relative paths begin in the current folder.
set -eu
clone=${{CLONE:-{clone}}} # on another machine: CLONE=/its/folder bash {name}
job=$(dirname "$(readlink -f "${{BASH_SOURCE[0]}}")")
cd "$clone"
source slurm/site.env
cd "$OLDPWD"
{command} "$@"
"""
_RUN = """# {about}
# Set {what} on storage that all nodes see.
{keys}
"""

_PART = (
    "it takes a part of a node: set SBATCH_CPUS_PER_GPU and SBATCH_MEM_PER_GPU in slurm/site.env "
    "(--cpus-per-gpu, --mem-per-gpu)"
)


def settings(args: argparse.Namespace, best: Counted) -> dict[str, Any]:
    """Return the job's run config keys: model, length, schedule and layout. A path that does not
    exist stands for the data, so that no booking trains on the built-in text.
    """
    question = best.question
    every = round(question.job(best).save_every_seconds / best.seconds)
    keys: dict[str, Any] = {
        **({} if question.run.data.mix else {"data.path": "/path/to/your/data"}),
        **_keys_set(question.run),
        "train.global_batch": args.global_batch,
        **best.layout.overrides,
        "optim.schedule": question.run.optim.schedule,
        "save.every": question.run.save.every or max(1, every),
    }
    if args.lora or args.init_from:
        keys["model.init_from"] = weights_of(args, question.run)
        del keys["model.name"]  # the weights name the model
    if not args.lora:
        keys["optim.lr"] = plan_of(args, best.layout, question.run).config.optim.lr
    return keys


def _keys_set(run: RunConfig) -> dict[str, Any]:
    """Return the keys that are set, with whole tables, whose own keys may be empty or have dots."""
    tree = run.model_dump(exclude_unset=True)
    return {key: reduce(getitem, key.split("."), tree) for key in known_keys() if run.is_set(key)}


def commands(args: argparse.Namespace, best: Counted, clone: str, job: str) -> dict[str, str]:
    """Return each script's command by its name, job.sh first; `clone` and `job` precede files."""
    files, train = _files(job), f"{clone}harness/train.py"
    # Otherwise Slurm may give a node's GPUs with one core and little memory.
    whole = "--exclusive --mem=0 " if _takes_whole_nodes(args) else ""
    per_node = best.question.some.gpus_per_node
    nodes = best.question.gpus // per_node
    booked = f"--nodes={nodes} --gpus-per-node={per_node} {whole}"
    slurm = f"sbatch {booked}{clone}slurm/train.sbatch {files}"
    if nodes == 1:
        one = f"deepspeed --num_gpus {per_node} {train} {files}"
        return {"job.sh": one, "sbatch.sh": slurm}
    return {
        "job.sh": slurm,
        "hostfile.sh": f"deepspeed --hostfile {job}hostfile {train} {files}",
        "torchrun.sh": f"torchrun --nnodes={nodes} --nproc-per-node={per_node} "
        '--node-rank="${NODE_RANK:?0 on the first node, 1 on the next, ...}" '
        '--master-addr="${MASTER_ADDR:?the name of the first node}" '
        f'--master-port="${{MASTER_PORT:-29500}}" {train} {files}',
    }


def _takes_whole_nodes(args: argparse.Namespace) -> bool:
    return bool(args.gpus >= (args.gpus_per_node or USUAL_NODE))


def _files(job: str) -> str:
    return f"--deepspeed {job}ds.json --config {job}run.toml"


def write_job(folder: Path, args: argparse.Namespace, best: Counted) -> list[str]:
    """Write ds.json, run.toml and a script per launcher; return lines that name and check them."""
    question, texts = best.question, dict[str, str]()
    per_node = question.some.gpus_per_node
    nodes = question.gpus // per_node
    about = (
        f"{args.model}, {args.gpus} x {args.gpu}: {best.layout.text}; {best.seconds:.2f} s per step"
    )
    about += f", {question.job(best).seconds / DAY:.1f} days (tools/plan_cluster.py)"
    texts["ds.json"] = json.dumps(best.deepspeed, indent=2) + "\n"
    keys = "\n".join(f"{k} = {value_as_text(v)}" for k, v in settings(args, best).items())
    what = "run.dir" if question.run.data.mix else "data.path (docs/data.md), and run.dir"
    texts["run.toml"] = _RUN.format(about=about, what=what, keys=keys)
    how = {
        "torchrun.sh": " on every node: NODE_RANK=0 MASTER_ADDR=node1 bash torchrun.sh",
        "hostfile.sh": " on the first node of the hostfile, which reaches the others by ssh",
    }
    part = "" if _takes_whole_nodes(args) else _PART
    if part:
        how["sbatch.sh"] = f" from any folder; {part}"
    clone = shlex.quote(str(REPOSITORY))
    for name, command in commands(args, best, '"$clone"/', '"$job"/').items():
        where = how.get(name, " from any folder")
        texts[name] = _SHELL.format(about=about, how=where, clone=clone, name=name, command=command)
    if nodes > 1:
        texts["hostfile"] = "".join(f"node{n + 1} slots={per_node}\n" for n in range(nodes))
    values = {"NODES": str(nodes), "GPUS": str(per_node), "NAME": "train", "RDMA": ""}
    is_inside = folder.resolve().is_relative_to(REPOSITORY)
    pod = folder.resolve().relative_to(REPOSITORY) if is_inside else Path(folder.resolve().name)
    copied = f"copy {folder} into the claim's clone, as {pod}"
    texts["kubernetes.yaml"] = filled_in(values | {"ARGUMENTS": _files(shlex.quote(f"{pod}/"))})
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    asked = f"--gpus {args.gpus} --gpus-per-node {per_node} --gpu {shlex.quote(args.gpu)}"
    return [
        f"written: {', '.join(str(folder / name) for name in texts)}",
        *([f"sbatch.sh: {part}"] if part else []),
        *([] if is_inside else [f"kubernetes.yaml: {copied}"]),
        f"check it with: python {script('harness/train.py')} --dry-run {asked} "
        + _files(shlex.quote(f"{folder}/")),
        "its upper end of memory may be smaller than the planner's (docs/planner.md)",
    ]


def filled_in(values: Mapping[str, str]) -> str:
    """Return the manifest of an Indexed Job, filled in; every pod may fail ten times."""
    text = _KUBERNETES.read_text(encoding="utf-8")
    text = text.replace("backoffLimit: 10\n", f"backoffLimit: {10 * int(values['NODES'])}\n")
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    return text
