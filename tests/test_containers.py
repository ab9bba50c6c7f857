"""Images and manifests for clusters: their content, and the results of their tools."""

import contextlib
import json
import os
import re
import shlex
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
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, environment, wait_for, write_corpus
from tests.run_tools import run_tool
from tests.tables import beside
from tools.batch_job import FINAL
from tools.cluster.job import filled_in

FOLDER = REPOSITORY / "slurm/containers"
RDMA = {"RDMA": "rdma/hca_shared_devices_a: 2"}
VALUES = {"NAME": "train", "NODES": "2", "WORKERS": "1", "GPUS": "8", "ARGUMENTS": "a=1 b=2"} | RDMA


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


def test_pods_of_both_kinds_start_the_same_command() -> None:
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
        assert words[1:] == ["exec", "bash", "slurm/node.sh", "a=1", "b=2", "run.dir=runs/train"]
        limits = {"nvidia.com/gpu": 8, "rdma/hca_shared_devices_a": 2}
        assert pod["resources"] == {"limits": limits}
        sizes = [{"name": "NODES", "value": "2"}, {"name": "GPUS", "value": "8"}]
        assert pod["env"][:2] == sizes
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    fails, goes_on, _ = job["spec"]["podFailurePolicy"]["rules"]
    assert fails["action"] == "FailJob"
    assert {0, *fails["onExitCodes"]["values"]} == FINAL
    assert (goes_on["action"], goes_on["onExitCodes"]["values"]) == ("Ignore", [75, 78])
    schemas = pytest.importorskip("kubernetes_validate")
    template = {"apiVersion": "v1", "kind": "PodTemplate", **replicas["Master"]}
    del template["replicas"], template["restartPolicy"]  # Kubeflow's own schema is not there
    for manifest in (*yaml.safe_load_all(filled_in(VALUES | {"RDMA": ""})), job, template):
        schemas.validate(manifest, schemas.latest_version(), strict=True)


RANK = beside(__file__, "containers.toml")["rank"]


def clone_in(folder: Path, site: str = "", train: str = "") -> Path:
    """Return a clone whose site.env ends with `site`; `train` replaces train.py."""
    clone = folder / "clone"
    (clone / "slurm").mkdir(parents=True)
    (clone / "slurm/node.sh").symlink_to(REPOSITORY / "slurm/node.sh")
    path = f"export PATH={Path(sys.executable).parent}:$PATH"
    (clone / "slurm/site.env").write_text(f"{path}\n{site}\n")
    (clone / "tools").symlink_to(REPOSITORY / "tools")
    if train:
        (clone / "harness").mkdir()
        (clone / "harness/train.py").write_text(train)
    else:
        (clone / "harness").symlink_to(REPOSITORY / "harness")
    return clone


@contextlib.contextmanager
def nodes_of(
    script: Path, words: Sequence[str], nodes: int = 2, **variables: str
) -> Iterator[list[Any]]:
    """Start a script on nodes that write to the files 0 and 1 where it lies; end what is left."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODES": str(nodes)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = []
    for number in range(nodes):
        here = environment(PATH=path, **job, **variables, NODE_RANK=str(number))
        with (script.parent / str(number)).open("w") as out:
            how: dict[str, Any] = {"stdout": out, "stderr": out, "start_new_session": True}
            started.append(
                subprocess.Popen(["bash", script, *words], cwd=script.parent, env=here, **how)
            )
    try:
        yield started
    finally:
        for node in started:
            with contextlib.suppress(ProcessLookupError):  # its ranks have ended, too
                os.killpg(node.pid, signal.SIGKILL)


def test_a_pod_ends_with_the_code_of_its_run_or_gives_up(tmp_path: Path) -> None:
    script = clone_in(tmp_path, "export CPU_RANKS_PER_NODE=2 PREFLIGHT=0", RANK) / "slurm/node.sh"
    ends = [
        *(([1, 137], 76, 76), ([137, 78], 78, 206), ([137, 1], None, 137), ([2, 1], None, 2)),
        *(([0, 0], 0, 0), ([75, 75], 75, 203), ([1, 1], 1, 2)),  # the fourth without a checkpoint
    ]
    for attempt, (codes, recorded, expected) in enumerate(ends, 1):
        record = json.dumps({"attempt": attempt, "code": recorded, "step": 3})
        words = [json.dumps(codes), record, f"run.dir={tmp_path / 'run'}"]
        with nodes_of(script, words, 1, RETRY_PLUS="128") as (pod,):
            assert pod.wait(100) == expected, (script.parent / "0").read_text()
    assert "ended 4 times without progress" in (script.parent / "0").read_text()
    with nodes_of(script, [], 1) as (pod,):
        assert pod.wait(100) == 2
    assert "set run.dir" in (script.parent / "0").read_text()


# What real ranks are given so that they end with a code; a signal reaches the first pod's.
REAL = {
    2: ("train.step=2",),
    74: ("train.steps=2", "save.every=1"),
    75: ("train.steps=100000", signal.SIGTERM),
    76: ("optim.lr=1e30", "guard.max_bad_steps=1", "optim.schedule=constant"),
    78: ("train.steps=100000", "guard.hang_floor_s=5", "guard.hang_first_s=20", signal.SIGSTOP),
    1: ("train.steps=100000", signal.SIGKILL),
}


@pytest.mark.gate("slurm")
@pytest.mark.parametrize("code", REAL)
def test_pods_of_ranks_end_with_the_runs_code(code: int, data: list[str], tmp_path: Path) -> None:
    limit = "ulimit -f 100" if code == 74 else ""  # in KiB: less than a checkpoint
    script = clone_in(tmp_path, f"export PREFLIGHT={int(code == 2)}\n{limit}") / "slurm/node.sh"
    run, own = RunFolder(tmp_path / "run"), [word for word in REAL[code] if isinstance(word, str)]
    words = [*SMALL_MODEL, *SHORT_RUN, *data, *own, f"run.dir={run.path}"]
    with nodes_of(script, words, STRAGGLER_S="10") as pods:
        for sent in REAL[code][len(own) :]:
            wait_for(lambda: len(run.read_metrics()) > 5, "the first steps", 300)
            rank = psutil.Process(pods[1].pid).children()[0]
            (pods[0] if sent == signal.SIGTERM else rank).send_signal(sent)
        codes = [pod.wait(400) for pod in pods]
    theirs = 137 if code == 1 else code  # of the rank that is killed
    assert codes == [code, theirs], (script.parent / "0").read_text()
    if code != 2:
        assert (run.read_status() or {})["code"] == code


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
    with nodes_of(tmp_path / "torchrun.sh", words) as nodes:
        assert [node.wait(600) for node in nodes] == [0, 0], (tmp_path / "0").read_text()
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
