"""Images and manifests for clusters: their content, and the results of their tools."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml  # type: ignore[import-untyped]

from harness.launch.ranks import free_port
from harness.runfolder import RunFolder
from tests.real_runs import (
    REPOSITORY,
    SHORT_RUN,
    SMALL_MODEL,
    environment,
    wait_for,
    write_corpus,
)
from tests.run_tools import run_tool
from tests.tiers import rest_in_gate
from tools.batch_job import FINAL
from tools.cluster.job import filled_in

FOLDER = REPOSITORY / "slurm/containers"
VALUES = {
    "NAME": "train",
    "NODES": "2",
    "WORKERS": "1",
    "GPUS": "8",
    "ARGUMENTS": "a=1 b=2",
    "RDMA": "",
}
RDMA = "rdma/hca_shared_devices_a"


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


def replicas_of(values: dict[str, str]) -> Any:
    """Return the replicas of Kubeflow's manifest, filled in."""
    text = (FOLDER / "pytorchjob.yaml").read_text()
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    assert "${" not in text
    return yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]


def test_pods_of_both_kinds_start_the_same_command() -> None:
    values = VALUES | {"RDMA": f"{RDMA}: 2"}
    service, job = yaml.safe_load_all(filled_in(values))
    replicas = replicas_of(values)
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    (indexed,) = job["spec"]["template"]["spec"]["containers"]
    (kubeflow,) = replicas["Master"]["template"]["spec"]["containers"]
    for pod in (indexed, kubeflow):
        words = pod["args"][0].split()
        assert words[1:] == ["exec", "bash", "slurm/node.sh", "a=1", "b=2", "run.dir=runs/train"]
        assert pod["resources"] == {"limits": {"nvidia.com/gpu": 8, RDMA: 2}}
        assert {"name": "NODES", "value": "2"} in pod["env"]
        assert {"name": "GPUS", "value": "8"} in pod["env"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_manifests_match_the_schema_of_kubernetes() -> None:
    """The schemas of Kubeflow are not among them, but its pods are Kubernetes'."""
    schemas = pytest.importorskip("kubernetes_validate")
    template = replicas_of(VALUES)["Master"]["template"]
    kubeflow = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
    for manifest in (*yaml.safe_load_all(filled_in(VALUES)), kubeflow):
        schemas.validate(manifest, schemas.latest_version(), strict=True)


def test_a_job_ends_or_goes_on_by_the_code_of_its_run() -> None:
    _, job = yaml.safe_load_all(filled_in(VALUES))
    fails, goes_on, _ = job["spec"]["podFailurePolicy"]["rules"]
    assert fails["action"] == "FailJob"
    assert {0, *fails["onExitCodes"]["values"]} == FINAL
    assert (goes_on["action"], goes_on["onExitCodes"]["values"]) == ("Ignore", [75, 78])


# A rank that leaves a record (rank 0) or waits for it, and ends with a code.
RANK = """\
import json, os, pathlib, sys, time
if "preflight" in sys.argv[0]:
    os._exit(0)
codes, recorded = json.loads(os.environ["ENDS"])
run = pathlib.Path(sys.argv[-1].removeprefix("run.dir="))
run.mkdir(exist_ok=True)
if os.environ["RANK"] == "0":
    attempt = int(os.environ["ATTEMPT"])
    record = {"attempt": attempt, "code": recorded, "step": 3}
    (run / "status.json").write_text("" if recorded is None else json.dumps(record))
    (run / f"ended-{attempt}").touch()
while not (run / f"ended-{os.environ['ATTEMPT']}").exists():
    time.sleep(0.1)
os._exit(codes[int(os.environ["LOCAL_RANK"])])
"""


def clone_in(folder: Path, site: str, rank: str = "") -> Path:
    """Return a clone whose site.env ends with `site`; `rank` is what its ranks run instead."""
    (folder / "clone/slurm").mkdir(parents=True)
    (folder / "clone/slurm/node.sh").symlink_to(REPOSITORY / "slurm/node.sh")
    path = f"export PATH={Path(sys.executable).parent}:$PATH"
    (folder / "clone/slurm/site.env").write_text(f"{path}\n{site}\n")
    for room in ("harness", "tools"):
        if not rank:
            (folder / "clone" / room).symlink_to(REPOSITORY / room)
            continue
        (folder / "clone" / room).mkdir()
        script = "train" if room == "harness" else "preflight"
        (folder / "clone" / room / f"{script}.py").write_text(rank)
    if rank:
        (folder / "clone/tools/batch_job.py").symlink_to(REPOSITORY / "tools/batch_job.py")
    return folder / "clone"


@contextlib.contextmanager
def pods_of(
    clone: Path, words: Sequence[str], nodes: int = 2, **variables: str
) -> Iterator[list[Any]]:
    """Start the pods of a job, whose output is in the files 0 and 1 beside the clone."""
    job = {"NODES": str(nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        pods = list[Any]()
        for number in range(nodes):
            variables["NODE_RANK"] = str(number)
            out = stack.enter_context((clone.parent / str(number)).open("w"))
            how: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT}
            command = ["bash", str(clone / "slurm/node.sh"), *words]
            pods.append(subprocess.Popen(command, env=environment(**job, **variables), **how))
            stack.callback(pods[-1].kill)
        yield pods


def codes_of(clone: Path, words: Sequence[str], nodes: int = 2, **variables: str) -> list[int]:
    """Return the codes with which the pods of a job end."""
    with pods_of(clone, words, nodes, **variables) as pods:
        return [pod.wait(400) for pod in pods]


# The code of a job, those of each pod's ranks, and the record.
ENDS = [
    *((76, [1, 137], 76), (78, [137, 78], 78), (137, [137, 1], None)),
    *((0, [0, 0], 0), (2, [2, 1], None), (74, [74, 1], 74), (75, [75, 75], 75)),
    *((77, [77, 77], 77), (1, [1, 1], 1)),
]


@pytest.mark.parametrize(("code", "ranks", "recorded"), rest_in_gate("slurm", ENDS, 2))
def test_a_pod_ends_with_the_code_of_its_run(
    code: int, ranks: list[int], recorded: int | None, tmp_path: Path
) -> None:
    clone = clone_in(tmp_path, "export CPU_RANKS_PER_NODE=2", RANK)
    ends = {"ENDS": json.dumps([ranks, recorded]), "ATTEMPT": "1"}
    assert codes_of(clone, [f"run.dir={tmp_path / 'run'}"], **ends) == [code, code]


def test_a_pod_gives_up_without_progress(tmp_path: Path) -> None:
    clone, ends = clone_in(tmp_path, "PREFLIGHT=0", RANK), {"ENDS": "[[75], 75]"}
    words, codes = [f"run.dir={tmp_path / 'run'}"], list[int]()
    for attempt in range(1, 5):
        codes += codes_of(clone, words, 1, ATTEMPT=str(attempt), RETRY_PLUS="128", **ends)
    assert codes == [203, 203, 203, 2]  # Kubeflow starts a pod again from 128 on
    assert "ended 4 times without progress" in (tmp_path / "0").read_text()
    assert codes_of(clone, [], 1) == [2]
    assert "set run.dir" in (tmp_path / "0").read_text()


# What real ranks are given so that they end with a code; a signal reaches the first pod's.
REAL = {
    0: ("train.steps=2",),
    2: ("train.step=2",),
    74: ("train.steps=2", "save.every=1"),
    75: ("train.steps=100000", signal.SIGTERM),
    76: ("optim.lr=1e30", "guard.max_bad_steps=1", "optim.schedule=constant"),
    77: ("resume.from={folder}/before@5",),
    78: ("train.steps=100000", "guard.hang_floor_s=5", "guard.hang_first_s=20", signal.SIGSTOP),
    1: ("train.steps=100000", signal.SIGKILL),
}


@pytest.mark.gate("slurm")
@pytest.mark.parametrize("code", REAL)
def test_pods_of_real_ranks_end_with_the_runs_code(
    code: int, data: list[str], tmp_path: Path
) -> None:
    limit = "ulimit -f 100" if code == 74 else ""  # in KiB: less than a checkpoint
    preflight = f"export PREFLIGHT={int(code == 2)}"
    clone = clone_in(tmp_path, f"{preflight}\n{limit}")
    (tmp_path / "before/checkpoints/step-00000001").mkdir(parents=True)
    run, own = RunFolder(tmp_path / "run"), [word for word in REAL[code] if isinstance(word, str)]
    words = [*SMALL_MODEL, *SHORT_RUN, *data, *own, f"run.dir={run.path}"]
    words = [word.format(folder=tmp_path) for word in words]
    with pods_of(clone, words, STRAGGLER_S="10") as pods:
        for sent in REAL[code][len(own) :]:
            wait_for(lambda: len(run.read_metrics()) > 5, "the first steps", 300)
            own_rank = psutil.Process(pods[1].pid).children()[0]
            (pods[0] if sent == signal.SIGTERM else own_rank).send_signal(sent)
        codes = [pod.wait(400) for pod in pods]
    assert codes == [code, code], (tmp_path / "0").read_text()
    if code not in (2, 77):
        assert (run.read_status() or {})["code"] == code


def test_deepspeed_reads_the_hostfile_that_is_written(tmp_path: Path) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    job = ("--model", "tiny", "--gpus", 4, "--gpus-per-node", 2, "--gpu", "a100-40")
    run_tool(*("plan_cluster", *job, "--seq-len", 128, "--global-batch", 8, "--write", tmp_path))
    assert runner.fetch_hostfile(str(tmp_path / "hostfile")) == {"node1": 2, "node2": 2}
    (words,) = re.findall(r"^deepspeed (.*) \"\$@\"$", (tmp_path / "hostfile.sh").read_text(), re.M)
    args = runner.parse_args(words.split())
    assert args.hostfile == str(tmp_path / "hostfile")
    assert args.user_script == "harness/train.py"


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
            cwd=REPOSITORY,
            env=here | {"NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [node.wait(600) for node in nodes] == [0, 0]
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
