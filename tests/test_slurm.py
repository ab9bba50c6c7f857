"""The shipped batch script, on a real Slurm of two nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.private_slurm import CannotStart, PrivateSlurm
from tests.two_ranks import REPOSITORY, run_ranks, train_command, wait_for, write_corpus

SCRIPT = REPOSITORY / "slurm" / "train.sbatch"
STEPS = 20
# Steps that take long enough to be stopped in the middle.
LONGER = ("data.seq_len=128", "train.global_batch=16", f"train.steps={STEPS}", "eval.every=0")


def test_the_scripts_are_clean_shell() -> None:
    files = [SCRIPT, SCRIPT.with_name("site.env")]
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    try:
        private = PrivateSlurm(tmp_path_factory.mktemp("slurm"))
    except CannotStart as error:
        pytest.skip(f"no Slurm: {error}")
    yield private
    private.close()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("slurm-data")
    corpus = write_corpus(folder / "corpus")
    data = [f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}"]
    zero3 = REPOSITORY / "ds_configs" / "zero3.json"
    return [*map(str, train_command(*data)[2:]), *LONGER, f"--deepspeed={zero3}"]


def submit(slurm: PrivateSlurm, folder: Path, *arguments: str) -> str:
    """Submit the shipped script on both nodes; returns the job's number."""
    folder.mkdir(exist_ok=True)
    output = f"--output={folder}/job.out"
    said = slurm.run("sbatch", "--nodes=2", "--time=30", output, SCRIPT, *arguments)
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found, said
    return found[1]


def ended(slurm: PrivateSlurm, job: str) -> bool:
    return slurm.state(job) in ("DONE", "COMPLETED", "FAILED", "CANCELLED")


@pytest.mark.slow
def test_a_job_that_is_warned_saves_requeues_itself_and_finishes_as_if_undisturbed(
    slurm: PrivateSlurm, arguments: list[str], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    job = submit(slurm, tmp_path, *arguments, f"run.dir={run.path}")
    log = tmp_path / "job.out"
    wait_for(lambda: len(run.read_metrics()) > 3 or ended(slurm, job), "the first steps", 300)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(partial(ended, slurm, job), f"job {job} to end\n{log.read_text()}", 400)
    said = log.read_text()
    assert "train.py ended with 75" in said, said
    assert "train.py ended with 0" in said, said
    lines = run.read_metrics()
    assert {line["attempt"] for line in lines} == {1, 2}
    done = [line["step"] for line in lines if "loss" in line]
    assert done == list(range(1, STEPS + 1))
    assert (run.read_status() or {})["outcome"] == "done"

    alone = [*arguments, f"run.dir={tmp_path / 'alone'}"]
    command = [*train_command()[:2], *alone]
    run_ranks(command, tmp_path / "alone-log").succeeded()
    undisturbed = RunFolder(tmp_path / "alone").read_metrics()
    assert [line.get("loss") for line in lines] == [line.get("loss") for line in undisturbed]


@pytest.mark.slow
def test_a_wrong_config_is_not_requeued(
    slurm: PrivateSlurm, arguments: list[str], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, *arguments, "train.stpes=3")
    wait_for(partial(ended, slurm, job), f"job {job} to end", 120)
    said = (tmp_path / "job.out").read_text()
    assert "did you mean train.steps?" in said
    assert "train.py ended with 2" in said
    assert said.count("train.py ended with") == 1
