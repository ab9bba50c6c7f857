"""Images and manifests for clusters: their content, and the results of their tools."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.real_runs import REPOSITORY, write_corpus
from tests.run_tools import run_tool
from tools.cluster.job import filled_in

FOLDER = REPOSITORY / "slurm/containers"
VALUES = {"NAME": "train", "NODES": "2", "WORKERS": "1", "GPUS": "8", "ARGUMENTS": "a=1 b=2"}


def test_docker_image_and_apptainer_definition_agree() -> None:
    docker, apptainer = ((FOLDER / name).read_text() for name in ("Dockerfile", "harness.def"))
    base = re.search(r"^FROM (\S+)$", docker, re.MULTILINE)
    assert base
    assert f"From: {base[1]}\n" in apptainer
    for words in ("[data,lora]", "cu128", "import torch, deepspeed, transformers", "pdsh"):
        assert words in docker
        assert words in apptainer
    sections = re.findall(r"^%(\w+)$", apptainer, re.MULTILINE)
    assert sections == ["files", "post", "environment", "test"]
    kept = re.findall(r"^!(.*)$", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE)
    assert re.findall(r"^    (\S+) /opt/decoder-harness/$", apptainer, re.MULTILINE) == kept
    assert [name for name in kept if not (REPOSITORY / name).exists()] == []
    if linter := shutil.which("hadolint"):
        subprocess.run([linter, FOLDER / "Dockerfile"], check=True)


def test_pods_of_both_kinds_start_the_same_command(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(filled_in(VALUES))
    text = (FOLDER / "pytorchjob.yaml").read_text()
    for name, value in VALUES.items():
        text = text.replace(f"${{{name}}}", value)
    assert "${" not in text
    replicas = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    (indexed,) = job["spec"]["template"]["spec"]["containers"]
    (kubeflow,) = replicas["Master"]["template"]["spec"]["containers"]
    for pod in (indexed, kubeflow):
        words = pod["args"][0].split()
        assert words[:4] == ["exec", "torchrun", "--nnodes=2", "--nproc-per-node=8"]
        assert words[-4:] == ["harness/train.py", "a=1", "b=2", "run.dir=runs/train"]
        assert pod["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    if validator := shutil.which("kubernetes-validate"):
        (tmp_path / "job.yaml").write_text(filled_in(VALUES))
        subprocess.run([validator, "--strict", tmp_path / "job.yaml"], check=True)


def test_deepspeed_reads_the_hostfile_that_is_written(tmp_path: Path) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    job = ("--model", "tiny", "--gpus", 4, "--gpus-per-node", 2, "--gpu", "a100-40")
    run_tool(*("plan_cluster", *job, "--seq-len", 128, "--global-batch", 8, "--write", tmp_path))
    assert runner.fetch_hostfile(str(tmp_path / "hostfile")) == {"node1": 2, "node2": 2}
    (words,) = re.findall(r"^deepspeed (.*) \"\$@\"$", (tmp_path / "hostfile.sh").read_text(), re.M)
    args = runner.parse_args(shlex.split(words))
    assert (args.hostfile, args.user_script) == ("$job/hostfile", "$clone/harness/train.py")


@pytest.mark.gate("slurm")
@pytest.mark.slow("two nodes that meet, and train")
def test_two_nodes_meet_by_torchrun_as_it_is_written(tmp_path: Path) -> None:
    job = ("--model", "tiny", "--gpus", 2, "--gpus-per-node", 1, "--gpu", "a100-40")
    run_tool(
        *("plan_cluster", *job, "--seq-len", 128, "--global-batch", 8, "--write", tmp_path),
        *("train.steps=2", "save.export=false", "eval.every=0"),
    )
    corpus, run = write_corpus(tmp_path / "corpus"), tmp_path / "run"
    words = (f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={run}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    nodes = [
        subprocess.Popen(
            ["bash", tmp_path / "torchrun.sh", *words],
            cwd=tmp_path,
            env=here | {"NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [node.wait(600) for node in nodes] == [0, 0]
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
