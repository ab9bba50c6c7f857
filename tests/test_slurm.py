"""The shipped batch script on a real Slurm with two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.layout.world import slurm_port
from harness.runfolder import RunFolder
from tests.private_slurm import CannotStart, PrivateSlurm
from tests.real_runs import (
    REPOSITORY,
    environment,
    events,
    run_ranks,
    train_command,
    wait_for,
    write_corpus,
)
from tests.sweeps.launched import write_sweep
from tests.tiers import rest_in_gate

SCRIPT = REPOSITORY / "slurm" / "train.sbatch"
STEPS = 20
# Replaces harness/train.py where the script's own decisions are tested. Each start of the job does
# what its word says: wait for a signal (without a handler if it is deaf), crash after saving that
# checkpoint, or end with that code.
STAND_IN = """
import os, pathlib, signal, sys, time

words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
what = words["starts"].split(",")[int(os.environ.get("SLURM_RESTART_COUNT", 0))]
print("meets at", os.environ["MASTER_PORT"], flush=True)
if what == "deaf":
    print("waits", flush=True)
    time.sleep(300)
if what == "waits":
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(75))
    print("waits", flush=True)
    time.sleep(300)
if what.startswith("step"):
    pathlib.Path(words["run.dir"], "checkpoints", what).mkdir(parents=True)
    sys.exit(1)
sys.exit(int(what))
"""
PYTHON = f"export PATH={Path(sys.executable).parent}:$PATH\n"
# A node on which Python finds no installed packages.
BARE_NODE = f"""#!/bin/bash
[[ $SLURMD_NODENAME == n2 ]] && exec {sys.executable} -S "$@"
exec {sys.executable} "$@"
"""
# Steps that take long enough to be stopped during a run.
LONGER = ("data.seq_len=128", "train.global_batch=16", f"train.steps={STEPS}", "eval.every=0")


def test_the_scripts_are_clean_shell() -> None:
    files = [path for path in SCRIPT.parent.iterdir() if path.is_file()]
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


CONTAINER = "--container-image=registry#x --container-workdir={here} --container-mounts={mounts}"
TOKENIZE = "python {clone}/tools/tokenize_data.py --task 3 --tasks 4 data.path=x"


@pytest.mark.parametrize(
    ("script", "site", "start"),
    [
        ("sweep", "[[ -d /nowhere ]]", "python {clone}/tools/sweep.py a.toml --trial 3"),
        ("tokenize", "[[ -d /nowhere ]]", TOKENIZE),
        (
            "tokenize",
            "CONTAINER=x.sif",
            f"apptainer exec --nv --bind {{clone}},{{here}} --pwd {{here}} x.sif {TOKENIZE}",
        ),
        (
            "tokenize",
            "CONTAINER=registry#x",
            f"srun --ntasks=1 --cpus-per-task=8 {CONTAINER} {TOKENIZE}",
        ),
    ],
)
def test_a_job_starts_its_program_where_the_site_says(
    tmp_path: Path, script: str, site: str, start: str
) -> None:
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
    assert done.stdout == start.format(clone=clone, here=tmp_path, mounts=mounts) + "\n", (
        done.stderr
    )


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("a warning", 124, "n1: python took more than 300 s to import torch\n"),
        ("no torch", 1, "n1: no torch\n"),
        ("", 139, "n1: python ended without a message\n"),
        ("a warning", 0, ""),
    ],
)
def test_a_node_says_why_its_python_is_not_complete(
    tmp_path: Path, output: str, code: int, said: str
) -> None:
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


def submit(
    slurm: PrivateSlurm, folder: Path, *arguments: str, preflight: bool = True, nodes: int = 2
) -> str:
    """Submit the shipped script; return the job's number."""
    folder.mkdir(exist_ok=True)
    # The preflight takes longer than the run; only runs after a warning, and a branch, use it.
    options = (
        f"--nodes={nodes}",
        "--time=30",
        *([] if preflight else ["--export=ALL,PREFLIGHT=0"]),
    )
    return sbatch(slurm, folder, REPOSITORY, *options, SCRIPT, *arguments)


def clone_of(folder: Path, site: str) -> Path:
    """Return a clone in `folder` with the shipped script, which starts STAND_IN."""
    clone = folder / "a clone"
    for path, text in (
        ("harness/train.py", STAND_IN),
        ("slurm/site.env", site),
        ("slurm/train.sbatch", SCRIPT.read_text()),
        ("slurm/container.sh", SCRIPT.with_name("container.sh").read_text()),
    ):
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_text(text)
    (clone / "tools").symlink_to(REPOSITORY / "tools")
    return clone


def submit_stand_in(
    slurm: PrivateSlurm,
    folder: Path,
    starts: str,
    *options: str,
    words: tuple[str, ...] = ("run.dir=run",),
) -> str:
    """Submit the shipped script on one node, from outside its clone."""
    script = clone_of(folder, f"{PYTHON}PREFLIGHT=0\n") / "slurm/train.sbatch"
    options = ("--nodes=1", "--time=30", *options)
    return sbatch(slurm, folder, folder, *options, script, f"starts={starts}", *words)


def sbatch(slurm: PrivateSlurm, folder: Path, cwd: Path, *words: object) -> str:
    answer = slurm.run("sbatch", f"--output={folder}/job.out", *words, cwd=cwd)
    submitted = re.search(r"Submitted batch job (\d+)", answer)
    assert submitted, answer
    return submitted[1]


def said_by(folder: Path) -> str:
    """Return the output of a job so far, over all its starts."""
    log = folder / "job.out"
    return log.read_text() if log.exists() else ""


def codes(folder: Path) -> list[int]:
    """Return the exit codes of train.py, start by start."""
    return [int(code) for code in re.findall(r"train.py ended with (\d+)", said_by(folder))]


def ended(slurm: PrivateSlurm, job: str) -> bool:
    return slurm.state(job) in ("DONE", "COMPLETED", "FAILED", "CANCELLED")


@pytest.mark.slow("a whole story of one job")
@pytest.mark.parametrize(("nodes", "preflight"), rest_in_gate("slurm", [(1, False), (2, True)]))
def test_a_job_that_is_warned_saves_requeues_itself_and_finishes_as_if_undisturbed(
    nodes: int, preflight: bool, slurm: PrivateSlurm, arguments: list[str], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    words = [*arguments, f"run.dir={run.path}"]
    job = submit(slurm, tmp_path, *words, preflight=preflight, nodes=nodes)
    log = tmp_path / "job.out"
    wait_for(lambda: len(run.read_metrics()) > 3 or ended(slurm, job), "the first steps", 300)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(partial(ended, slurm, job), f"job {job} to end\n{log.read_text()}", 400)
    output = log.read_text()
    assert output.count("preflight: ok to start") == 2 * preflight, output
    assert "train.py ended with 75" in output, output
    assert "train.py ended with 0" in output, output
    first, second = events(run, "time_limit")  # as squeue reported
    assert 1500 < first["seconds_left"] <= 1800
    assert 1500 < second["seconds_left"] <= 1800  # a requeued job has its full time again
    lines = run.read_metrics()
    assert {line["attempt"] for line in lines} == {1, 2}
    done = [line["step"] for line in lines if "loss" in line]
    assert done == list(range(1, STEPS + 1))
    assert (run.read_status() or {})["outcome"] == "done"

    alone = [*arguments, f"run.dir={tmp_path / 'alone'}"]
    command = [*train_command()[:2], *alone]
    run_ranks(command, tmp_path / "alone-log", ranks=nodes).succeeded()
    undisturbed = RunFolder(tmp_path / "alone").read_metrics()
    assert [line.get("loss") for line in lines] == [line.get("loss") for line in undisturbed]


@pytest.mark.gate("slurm")
def test_a_wrong_config_is_not_requeued(
    slurm: PrivateSlurm, arguments: list[str], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, *arguments, "train.stpes=3")
    wait_for(partial(ended, slurm, job), f"job {job} to end", 120)
    output = (tmp_path / "job.out").read_text()
    assert output.count("did you mean train.steps?") == 1  # one report for all ranks
    assert output.count("preflight.py ended with 2: not started") == 1
    assert "train.py ended with" not in output


@pytest.mark.gate("slurm")
def test_a_config_that_only_the_run_refuses_is_not_requeued(
    slurm: PrivateSlurm, tmp_path: Path
) -> None:
    """Not even because of files from an earlier attempt in the run folder that the config names."""
    (tmp_path / "run/heartbeats").mkdir(parents=True)
    (tmp_path / "run/heartbeats/hang.json").write_text("{}")
    (tmp_path / "my.toml").write_text('[run]\ndir = "run"\n')
    job = submit_stand_in(slurm, tmp_path, "2,0", words=("--config", "my.toml"))
    wait_for(partial(ended, slurm, job), f"job {job} to end", 120)
    assert codes(tmp_path) == [2], said_by(tmp_path)


@pytest.mark.gate("slurm")
def test_a_job_finds_its_run_folder_and_a_free_port(slurm: PrivateSlurm, tmp_path: Path) -> None:
    """The run config in the folder of submission sets it; the default port is taken."""
    (tmp_path / "my.toml").write_text('[run]\ndir = "from the file"\n')
    words = ("--config=my.toml",)
    job = submit_stand_in(slurm, tmp_path, "1,0", "--hold", words=words)
    taken = slurm_port({"SLURM_JOB_ID": job})
    with socket.create_server(("127.0.0.1", taken)):
        slurm.run("scontrol", "release", job)
        wait_for(partial(ended, slurm, job), f"job {job} to end", 120)
    assert codes(tmp_path) == [1, 0], said_by(tmp_path)
    ports = [int(port) for port in re.findall(r"meets at (\d+)", said_by(tmp_path))]
    assert ports[0] == taken + 1
    assert ports[1] not in (taken, taken + 1)  # another attempt, another port
    assert (tmp_path / "from the file/endings").read_text() == f"job {job} after none\n"
    assert "run.dir=" not in said_by(tmp_path)


# Prints the arguments of a container's tool and runs the program: no tool can be installed here.
APPTAINER = """#!/bin/bash
echo "apptainer $*" >> "$(dirname "$0")/said"
until [[ $1 == *.sif ]]; do shift; done
shift
exec "$@"
"""
SRUN = """#!/bin/bash
words=()
for word in "$@"; do
  [[ $word == --container-* ]] || { words+=("$word"); continue; }
  echo "$word" >> "$(dirname "$0")/said"
done
exec /usr/bin/srun "${words[@]}"
"""


@pytest.mark.gate("slurm")
@pytest.mark.parametrize(
    ("tool", "script", "image"),
    [("apptainer", APPTAINER, "/images/harness.sif"), ("srun", SRUN, "registry#harness:1")],
)
def test_a_job_runs_in_the_container_that_the_site_names(
    slurm: PrivateSlurm, tmp_path: Path, tool: str, script: str, image: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / tool).write_text(script)
    (tmp_path / "bin" / tool).chmod(0o755)
    site = f"export PATH={tmp_path}/bin:{Path(sys.executable).parent}:$PATH\n"
    site += f"export PREFLIGHT=0 CONTAINER='{image}' CONTAINER_MOUNTS=/data\n"
    clone = clone_of(tmp_path, site)
    options = ("--nodes=1", "--time=30", clone / "slurm/train.sbatch")
    job = sbatch(slurm, tmp_path, tmp_path, *options, "starts=1,0", "run.dir=run")
    wait_for(partial(ended, slurm, job), f"job {job} to end")
    assert codes(tmp_path) == [1, 0], said_by(tmp_path)
    said = (tmp_path / "bin/said").read_text()
    folders = (str(clone), str(tmp_path), "/data")
    if tool == "srun":
        assert f"--container-image={image}\n" in said
        assert f"--container-workdir={tmp_path}\n" in said
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        assert f"--container-mounts={mounts}\n" in said
    else:
        start = f"apptainer exec --nv --bind {','.join(folders)} --pwd {tmp_path} {image} python"
        assert f"{start} {clone}/harness/train.py" in said
        assert f"{start} {clone}/tools/batch_job.py verdict" in said


@pytest.mark.gate("slurm")
def test_a_node_without_the_environment_is_named_and_nobody_waits(
    slurm: PrivateSlurm, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(BARE_NODE)
    (tmp_path / "python").chmod(0o755)
    clone = clone_of(tmp_path, f"export PATH={tmp_path}:$PATH\n")
    options = ("--nodes=2", "--time=30", clone / "slurm/train.sbatch")
    job = sbatch(slurm, tmp_path, tmp_path, *options, "starts=0", "run.dir=run")
    wait_for(partial(ended, slurm, job), f"job {job} to end", 59)  # less than any rank would wait
    output = said_by(tmp_path)
    assert f"n2: {sys.executable} cannot import torch, deepspeed" in output
    assert "n1:" not in output
    assert output.count("not started: fix Python there (slurm/site.env)") == 1
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", job)
    assert not (tmp_path / "run").exists()


@pytest.mark.gate("slurm")
def test_a_script_without_its_clone_says_so(slurm: PrivateSlurm, tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(SCRIPT.read_text())
    job = sbatch(slurm, tmp_path, tmp_path, "--nodes=1", script)
    wait_for(partial(ended, slurm, job), f"job {job} to end", 60)
    assert f"n1 cannot see {tmp_path}/harness/train.py" in said_by(tmp_path)
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", job)


@pytest.mark.gate("slurm")
def test_a_warning_during_the_preflight_requeues_the_job_as_it_is(
    slurm: PrivateSlurm, arguments: list[str], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    job = submit(slurm, tmp_path, *arguments, f"run.dir={run.path}", "train.steps=1")
    wait_for(lambda: "measuring machines" in said_by(tmp_path), "the preflight", 100)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(partial(ended, slurm, job), f"job {job} to end", 400)
    output = said_by(tmp_path)
    assert re.findall(r"(\w+).py ended with (\d+)", output) == [("preflight", "75"), ("train", "0")]
    assert "on 2 nodes" in output
    assert "links between nodes" in output
    assert list(tmp_path.glob(".preflight*")) == []


@pytest.fixture(scope="module")
def side_by_side(
    slurm: PrivateSlurm, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return two jobs that have ended: one that crashes, and one stopped only by its time limit."""
    crashing, limited = (tmp_path_factory.mktemp(name) / "job" for name in ("crash", "limit"))
    jobs = [
        submit_stand_in(slurm, crashing, "1,step-00000007,1,1,1,0"),
        submit_stand_in(slurm, limited, "waits,0", "--time=4"),  # warned after a minute
    ]
    wait_for(lambda: all(ended(slurm, job) for job in jobs), f"jobs {jobs} to end", 600)
    return crashing, limited


@pytest.mark.gate("slurm")
def test_a_crash_is_requeued_three_times_without_progress(side_by_side: tuple[Path, Path]) -> None:
    crashing, _ = side_by_side
    assert codes(crashing) == [1] * 5, said_by(crashing)  # its second start saved a checkpoint
    assert said_by(crashing).endswith("ended 4 times without progress: not requeued\n")


@pytest.mark.gate("slurm")
def test_the_time_limit_is_seen_coming(side_by_side: tuple[Path, Path]) -> None:
    _, limited = side_by_side
    assert codes(limited) == [75, 0], said_by(limited)


def cancelled(
    slurm: PrivateSlurm, folder: Path, *options: str, starts: str = "waits,0"
) -> list[int]:
    """Return the codes of a job that was cancelled with `scancel` while it ran."""
    job = submit_stand_in(slurm, folder, starts)
    wait_for(lambda: "waits" in said_by(folder), "the start", 60)
    slurm.run("scancel", *options, job)
    wait_for(partial(ended, slurm, job), f"job {job} to end", 60)
    return codes(folder)


@pytest.mark.gate("slurm")
def test_a_term_to_the_script_lets_the_ranks_save_before_it_requeues(
    slurm: PrivateSlurm, tmp_path: Path
) -> None:
    assert cancelled(slurm, tmp_path, "--signal=TERM", "--batch") == [75, 0], said_by(tmp_path)


@pytest.mark.gate("slurm")
def test_a_warning_that_kills_ranks_while_they_start_requeues_the_job(
    slurm: PrivateSlurm, tmp_path: Path
) -> None:
    stopped = cancelled(slurm, tmp_path, "--signal=USR1", "--batch", starts="deaf,0")
    assert stopped == [75, 0], said_by(tmp_path)
    assert not (tmp_path / "run/endings").exists()  # no attempt without progress


@pytest.mark.gate("slurm")
def test_a_job_that_a_user_cancels_is_not_requeued(slurm: PrivateSlurm, tmp_path: Path) -> None:
    assert len(cancelled(slurm, tmp_path)) == 1, said_by(tmp_path)


def process_of(run: RunFolder, rank: int) -> int:
    """Return a rank's process id from its own heartbeat."""
    path = run.heartbeats_dir / f"rank-{rank:05d}.json"
    wait_for(lambda: path.exists() and path.stat().st_size, f"{path} to be written", 60)
    return int(json.loads(path.read_text())["pid"])


def attempt_goes_on(run: RunFolder, attempt: int) -> bool:
    """Return True if it has taken steps, one of them after a save."""
    return sum(line["attempt"] == attempt and "loss" in line for line in run.read_metrics()) > 6


def end_of(slurm: PrivateSlurm, job: str, folder: Path) -> list[int]:
    """Return the codes of all starts of a job, once it has ended."""
    wait_for(partial(ended, slurm, job), f"job {job} to end\n{said_by(folder)}", 400)
    return codes(folder)


@pytest.fixture(scope="module")
def fine_tuning(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: str) -> list[str]:
    """Return the README's example: a local model folder, and prompts with completions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("fine-tuning")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=8192, **sizes, **heads)).save_pretrained(folder / "m")
    shutil.copytree(tokenizer_dir, folder / "m", dirs_exist_ok=True)
    lines = [
        {"prompt": f"{n} + {n} =", "completion": f" {2 * n}, in words " * 9} for n in range(400)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = (f"model.name={folder / 'm'}", f"model.init_from={folder / 'm'}")
    data = (f"data.path={folder / 'pairs.jsonl'}", f"data.cache_dir={folder / 'cache'}")
    batch = ("data.seq_len=128", "train.global_batch=16", "train.micro_batch=2", "train.steps=24")
    save = ("save.every=4", "save.keep=99", "eval.every=0", "sample.tokens=0", "save.export=false")
    guard = ("guard.hang_floor_s=15", "guard.hang_factor=8")
    zero3 = REPOSITORY / "ds_configs" / "zero3.json"
    return [f"--deepspeed={zero3}", *model, *data, *batch, *save, *guard]


@pytest.mark.gate("slurm")
def test_fine_tuning_outlives_a_hang_and_a_kill_and_branches_off(
    slurm: PrivateSlurm, fine_tuning: list[str], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    words = (*fine_tuning, f"run.dir={run.path}")
    job = submit(slurm, tmp_path / "job", *words, preflight=False)
    for attempt, number in ((1, signal.SIGSTOP), (2, signal.SIGKILL)):
        wait_for(partial(attempt_goes_on, run, attempt), f"attempt {attempt} to get on", 300)
        os.kill(process_of(run, rank=1), number)
    hung, killed, done = end_of(slurm, job, tmp_path / "job")
    assert (hung, done) == (78, 0), said_by(tmp_path / "job")
    assert killed not in (0, 2, 75, 78)
    assert re.search(
        r"ended with \d+; newest checkpoint: step-0000000[1-9]", said_by(tmp_path / "job")
    )
    (hang,) = events(run, "hang")
    assert re.search(r"rank 1 on .*: stopped, gone", hang["message"])
    assert len(events(run, "resumed")) == 2
    assert [line["step"] for line in run.read_metrics()] == list(range(25))
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert sum("loss" in line for line in lines) <= 24 + 2 * 4  # four between two saves

    lower = RunFolder(tmp_path / "lower")
    other = (f"resume.from={run.path}@8", f"run.dir={lower.path}", "optim.lr=1e-5")
    job = submit(slurm, tmp_path / "branch", *fine_tuning, *other)
    assert end_of(slurm, job, tmp_path / "branch") == [0], said_by(tmp_path / "branch")
    assert events(lower, "branched")[0]["step"] == 8


@pytest.mark.gate("slurm")
def test_a_node_that_goes_down_is_left_and_the_job_goes_on(
    slurm: PrivateSlurm, fine_tuning: list[str], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    words = (*fine_tuning, f"run.dir={run.path}")
    job = submit(slurm, tmp_path / "job", *words, preflight=False)
    wait_for(partial(attempt_goes_on, run, 1), "the first steps", 300)
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    wait_for(lambda: slurm.state(job) == "PENDING", "the job to be requeued", 120)
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    assert end_of(slurm, job, tmp_path / "job")[-1] == 0, said_by(tmp_path / "job")
    assert events(run, "resumed")[0]["step"] >= 4
    assert [line["step"] for line in run.read_metrics()] == list(range(25))


@pytest.mark.gate("slurm")
def test_a_sweep_is_one_array_whose_tasks_are_stopped_early_and_requeued(
    slurm: PrivateSlurm, data: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    settings = "method = 'grid'\nprune = {after = 0.1}\nslurm = {nodes = 1, time = 30}"
    path = write_sweep(tmp_path, "ours", settings, "optim.lr = [1e-2, 1e-5]", data)
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "tools" / "sweep.py", path.name, "--slurm"],
        cwd=tmp_path,
        env={**slurm.env, **environment(PREFLIGHT="0", SLURM_CONF=slurm.env["SLURM_CONF"])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = tmp_path / "runs" / "ours"
    first, second = (RunFolder(folder / f"trial-00{number}") for number in range(2))
    try:
        wait_for(lambda: len(first.read_metrics()) > 7, "the first decision", 600)
        job = (folder / "slurm_job").read_text().strip()
        slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_0")
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    logs = output + "\n".join(log.read_text() for log in folder.glob("slurm-*.out"))
    assert process.returncode == 0, logs
    assert "2 of 2 trials" in output, logs
    assert "trial 001 | lr=1e-05 | pruned: stopped after 10% of its run" in output
    assert [line["step"] for line in first.read_metrics()] == list(range(41))
    statuses = [run.read_status() or {} for run in (first, second)]
    assert [status["outcome"] for status in statuses] == ["done", "stopped"], logs
    assert [status["attempt"] for status in statuses] == [2, 1], logs
