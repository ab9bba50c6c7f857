"""The decisions of the shipped batch scripts, on a real Slurm with stand-ins for train.py."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.layout.world import slurm_port
from tests.private_slurm import Job, PrivateSlurm
from tests.real_runs import REPOSITORY
from tests.tables import beside

TABLES = beside(__file__, "slurm.toml")

SCRIPT = REPOSITORY / "slurm" / "train.sbatch"
PYTHON = f"export PATH={Path(sys.executable).parent}:$PATH\n"
UNCHECKED = f"{PYTHON}PREFLIGHT=0\n"
# A node on which Python finds no installed packages.
BARE_NODE = f"""#!/bin/bash
[[ $SLURMD_NODENAME == n2 ]] && exec {sys.executable} -S "$@"
exec {sys.executable} "$@"
"""


def test_the_scripts_are_clean_shell() -> None:
    files = [path for path in SCRIPT.parent.iterdir() if path.is_file()]
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("script", "site", "start"), TABLES["starts"])
def test_job_starts_where_the_site_says(tmp_path: Path, script: str, site: str, start: str) -> None:
    """Whatever the last line of site.env returns. Stand-ins print how they are started."""
    clone = tmp_path / "a clone"
    shutil.copytree(SCRIPT.parent, clone / "slurm")
    (clone / "slurm/site.env").write_text(f"PATH={tmp_path}:$PATH\n{site}\n")
    (clone / "tools").mkdir()
    (clone / "tools/tokenize_data.py").touch()
    words = [str(clone), "a.toml"] if script == "sweep" else ["data.path=x"]
    command = f"Command={clone}/slurm/{script}.sbatch {' '.join(words)}"
    for name in ("python", "apptainer", "srun"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho '{command}'\n")
    for name in ("python", "apptainer", "srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    array = {"ID": "3", "MIN": "0", "MAX": "3", "COUNT": "4"}
    job = {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    job |= {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_ON_NODE": "8"}
    done = subprocess.run(
        ["bash", clone / f"slurm/{script}.sbatch", *words],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **job},
        capture_output=True,
        text=True,
    )
    mounts = f"{clone}:{clone},{tmp_path}:{tmp_path}"
    started = start.format(clone=clone, here=tmp_path, mounts=mounts)
    assert done.stdout == f"{started}\n", done.stderr


@pytest.mark.parametrize(("output", "code", "said"), TABLES["pythons"])
def test_node_names_an_incomplete_python(tmp_path: Path, output: str, code: int, said: str) -> None:
    (tmp_path / "timeout").write_text(f"#!/bin/bash\necho -n '{output}'\nexit {code}\n")
    (tmp_path / "timeout").chmod(0o755)
    (function,) = re.findall(r"^find_python\(\) \{.*?^\}", SCRIPT.read_text(), re.M | re.S)
    done = subprocess.run(
        ["bash", "-c", f"{function}\nfind_python", "preflight.py"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == (said, 2 if code else 0)


def clone_of(folder: Path, site: str) -> Path:
    """Return a clone in `folder` with the shipped script, which starts a stand-in."""
    clone = folder / "a clone"
    for path, text in (
        ("harness/train.py", TABLES["stand_in"]),
        ("slurm/site.env", site),
        ("slurm/train.sbatch", SCRIPT.read_text()),
        ("slurm/container.sh", SCRIPT.with_name("container.sh").read_text()),
    ):
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_text(text)
    (clone / "tools").symlink_to(REPOSITORY / "tools")
    # In the folder of submission, outside the clone.
    (folder / "my.toml").write_text('[run]\ndir = "runs/first"\n')
    return clone


def submit(
    slurm: PrivateSlurm, folder: Path, starts: str, *options: str, site: str = UNCHECKED
) -> Job:
    """Submit the shipped script, from outside its clone."""
    script = clone_of(folder, site) / "slurm/train.sbatch"
    words = ("--nodes=1", "--time=30", *options, script, f"starts={starts}", "--config=my.toml")
    return slurm.submit(folder, *words, cwd=folder)


IMAGES = {"apptainer": "/images/harness.sif", "srun": "registry#harness:1"}


@pytest.fixture(scope="module")
def jobs(slurm: PrivateSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Yield jobs that run side by side while others are looked at."""
    crashing, limited, refused = map(tmp_path_factory.mktemp, ("crashing", "limited", "refused"))
    (refused / "runs/first/heartbeats").mkdir(parents=True)  # files of an earlier attempt
    (refused / "runs/first/heartbeats/hang-0.json").write_text("{}")
    crash = submit(slurm, crashing, "1,step-00000007,1,1,1,0", "--hold")
    with socket.create_server(("127.0.0.1", first_port(crash))):
        slurm.run("scontrol", "release", crash.number)
        yield {
            "crashing": crash,
            "limited": submit(slurm, limited, "waits,0", "--time=5"),  # warned after two minutes
            "refused": submit(slurm, refused, "2,0"),
            **{n: submit_contained(slurm, tmp_path_factory.mktemp(n), n) for n in IMAGES},
        }


def first_port(job: Job) -> int:
    return slurm_port({"SLURM_JOB_ID": job.number})


def submit_contained(slurm: PrivateSlurm, folder: Path, tool: str) -> Job:
    (folder / "bin").mkdir()
    (folder / "bin" / tool).write_text(TABLES[tool])
    (folder / "bin" / tool).chmod(0o755)
    site = f"export PATH={folder}/bin:{Path(sys.executable).parent}:$PATH\n"
    site += f"export PREFLIGHT=0 CONTAINER='{IMAGES[tool]}' CONTAINER_MOUNTS=/data\n"
    return submit(slurm, folder, "1,0", site=site)


@pytest.mark.gate("slurm")
def test_only_the_user_ends_jobs(slurm: PrivateSlurm, tmp_path: Path, jobs: dict[str, Job]) -> None:
    """A TERM lets the ranks save; a warning kills ranks that are still starting."""
    job = submit(slurm, tmp_path, "waits,deaf,waits,0")
    signals = (("--signal=TERM", "--batch"), ("--signal=USR1", "--batch"), ())
    for start, options in enumerate(signals):
        job.until(lambda n=start: job.output.count("waits") > n, f"start {start}")
        job.cancel(*options)
    assert job.codes()[:2] == [75, 75], job.output
    assert job.output.count("meets at") == 3, job.output  # no fourth start
    assert not (tmp_path / "runs/first/endings").exists()  # no attempt without progress


@pytest.mark.gate("slurm")
def test_a_crash_is_requeued_three_times_without_progress(jobs: dict[str, Job]) -> None:
    assert jobs["crashing"].codes() == [1] * 5, jobs["crashing"].output  # its second start saves
    assert jobs["crashing"].output.endswith("ended 4 times without progress: not requeued\n")


@pytest.mark.gate("slurm")
def test_a_job_finds_its_run_folder_and_a_free_port(jobs: dict[str, Job]) -> None:
    """The run config in the folder of submission sets it; the default port is taken."""
    job, taken = jobs["crashing"], first_port(jobs["crashing"])
    assert len(job.codes()) == 5, job.output
    ports = [int(port) for port in re.findall(r"meets at (\d+)", job.output)]
    assert ports[0] == taken + 1
    assert len({taken, *ports}) == 6  # another attempt, another port
    endings = (job.log.parent / "runs/first/endings").read_text().splitlines()
    newest = ("none", *["step-00000007"] * 4)
    assert endings == [f"job {job.number} after {name}" for name in newest]
    assert "run.dir=" not in job.output


@pytest.mark.gate("slurm")
def test_slurm_time_limit_ends_an_attempt_with_code_75(jobs: dict[str, Job]) -> None:
    assert jobs["limited"].codes() == [75, 0], jobs["limited"].output


@pytest.mark.gate("slurm")
def test_a_config_that_only_the_run_refuses_is_not_requeued(jobs: dict[str, Job]) -> None:
    """Not even because of files from an earlier attempt in the run folder that the config names."""
    assert jobs["refused"].codes() == [2], jobs["refused"].output


@pytest.mark.gate("slurm")
@pytest.mark.parametrize("tool", IMAGES)
def test_a_job_runs_in_the_container_that_the_site_names(jobs: dict[str, Job], tool: str) -> None:
    job = jobs[tool]
    assert job.codes() == [1, 0], job.output
    folder, image = job.log.parent, IMAGES[tool]
    said = (folder / "bin/said").read_text()
    clone = f"{folder}/a clone"
    folders = (clone, str(folder), "/data")
    if tool == "srun":
        assert f"--container-image={image}\n" in said
        assert f"--container-workdir={folder}\n" in said
        mounts = ",".join(f"{each}:{each}" for each in folders)
        assert f"--container-mounts={mounts}\n" in said
    else:
        start = f"apptainer exec --nv --bind {','.join(folders)} --pwd {folder} {image} python"
        assert f"{start} {clone}/harness/train.py" in said
        assert f"{start} {clone}/tools/batch_job.py verdict" in said


@pytest.mark.gate("slurm")
def test_node_without_environment_is_named_at_once(slurm: PrivateSlurm, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(BARE_NODE)
    (tmp_path / "python").chmod(0o755)
    site = f"export PATH={tmp_path}:$PATH\n"
    job = submit(slurm, tmp_path, "0", "--nodes=2", site=site)
    job.codes(59)  # less than any rank would wait
    assert f"n2: {sys.executable} cannot import torch, deepspeed" in job.output
    assert "n1:" not in job.output
    assert job.output.count("not started: fix Python there (slurm/site.env)") == 1
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", job.number)
    assert not (tmp_path / "runs").exists()


@pytest.mark.gate("slurm")
def test_a_script_without_its_clone_says_so(slurm: PrivateSlurm, tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(SCRIPT.read_text())
    job = slurm.submit(tmp_path, "--nodes=1", script, cwd=tmp_path)
    job.codes(60)
    assert re.search(rf"n[12] cannot see {tmp_path}/harness/train.py", job.output)
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", job.number)
