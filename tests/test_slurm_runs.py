"""Real runs of the shipped batch script on a real Slurm with two nodes."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.private_slurm import Job, PrivateSlurm
from tests.real_runs import REPOSITORY, events, run_ranks, train_command, wait_for, write_corpus
from tests.sweeps import launched
from tests.sweeps.launched import write_sweep
from tests.tiers import rest_in_gate

STEPS, MANY_STEPS = 20, 40
# Steps that take long enough to be stopped during a run.
LONGER = ("data.seq_len=128", "train.global_batch=16", f"train.steps={STEPS}", "eval.every=0")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("slurm-data")
    corpus = write_corpus(folder / "corpus")
    data = [f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}"]
    zero3 = REPOSITORY / "ds_configs" / "zero3.json"
    return [*map(str, train_command(*data)[2:]), *LONGER, f"--deepspeed={zero3}"]


def submit(
    slurm: PrivateSlurm, folder: Path, *arguments: str, preflight: bool = True, nodes: int = 2
) -> Job:
    """Submit the shipped script."""
    script = REPOSITORY / "slurm" / "train.sbatch"
    # The preflight takes longer than the run.
    options = [] if preflight else ["--export=ALL,PREFLIGHT=0"]
    words = (f"--nodes={nodes}", "--time=30", *options, script, *arguments)
    return slurm.submit(folder, *words, cwd=REPOSITORY)


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
    batch = ("data.seq_len=128", "train.global_batch=16", "train.micro_batch=2")
    save = ("save.every=4", "save.keep=99", "eval.every=0", "sample.tokens=0", "save.export=false")
    guard = ("guard.hang_floor_s=15", "guard.hang_factor=8")
    zero3 = REPOSITORY / "ds_configs" / "zero3.json"
    ds = (f"--deepspeed={zero3}", f"train.steps={MANY_STEPS}")
    return [*ds, *model, *data, *batch, *save, *guard]


@pytest.mark.gate("slurm")
def test_fine_tuning_survives(slurm: PrivateSlurm, fine_tuning: list[str], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    job = submit(slurm, tmp_path, *fine_tuning, f"run.dir={run.path}", preflight=False)
    job.until(lambda: goes_on(run, attempt=1), "the first attempt")
    os.kill(process_of(run, rank=1), signal.SIGSTOP)
    job.until(lambda: goes_on(run, attempt=2), "the second attempt")
    os.kill(process_of(run, rank=1), signal.SIGKILL)
    job.until(lambda: goes_on(run, attempt=3), "the third attempt")
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.until(lambda: job.state == "PENDING", "it is requeued", 120)
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    hung, killed, *_, done = job.codes()
    assert (hung, done) == (78, 0), job.output
    assert killed not in (0, 2, 75, 78)
    assert re.search(r"ended with \d+; newest checkpoint: step-0000000[1-9]", job.output)
    (hang,) = events(run, "hang")
    assert re.search(r"rank 1 on .*: stopped, gone", hang["message"])
    assert len(resumed := events(run, "resumed")) == 3
    assert resumed[0]["step"] >= 4
    assert [line["step"] for line in run.read_metrics()] == list(range(MANY_STEPS + 1))
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert sum("loss" in line for line in lines) <= MANY_STEPS + 3 * 4  # four between two saves


def process_of(run: RunFolder, rank: int) -> int:
    """Return a rank's process id from its own heartbeat."""
    path = run.heartbeats_dir / f"rank-{rank:05d}.json"
    wait_for(lambda: path.exists() and path.stat().st_size, f"{path} to be written", 60)
    return int(json.loads(path.read_text())["pid"])


def goes_on(run: RunFolder, attempt: int) -> bool:
    """Return True if it has taken steps, one of them after a save."""
    return sum(line["attempt"] == attempt and "loss" in line for line in run.read_metrics()) > 6


@pytest.mark.slow("a whole story of one job")
@pytest.mark.parametrize(("nodes", "preflight"), rest_in_gate("slurm", [(1, False), (2, True)]))
def test_warned_job_saves_requeues_and_equals_undisturbed_run(
    nodes: int, preflight: bool, slurm: PrivateSlurm, arguments: list[str], tmp_path: Path
) -> None:
    """A warning during the preflight requeues it as it is."""
    run = RunFolder(tmp_path / "run")
    words = [*arguments, f"run.dir={run.path}"]
    job = submit(slurm, tmp_path, *words, preflight=preflight, nodes=nodes)
    if preflight:
        job.until(lambda: "measuring machines" in job.output, "the preflight", 100)
        job.cancel("--signal=USR1", "--batch")
    job.until(lambda: len(run.read_metrics()) > 3, "the first steps")
    job.cancel("--signal=USR1", "--batch")
    assert job.codes() == [75, 0], job.output
    ends = re.findall(r"(\w+).py ended with (\d+)", job.output)
    assert ends == [*[("preflight", "75")] * preflight, ("train", "75"), ("train", "0")]
    assert job.output.count("preflight: ok to start") == 2 * preflight, job.output
    if preflight:
        assert "on 2 nodes" in job.output
        assert "links between nodes" in job.output
    assert list(tmp_path.glob(".preflight*")) == []
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
def test_wrong_config_is_not_requeued(slurm: PrivateSlurm, arguments: list[str], tmp_path) -> None:
    job = submit(slurm, tmp_path, *arguments, "train.stpes=3")
    assert job.codes(120) == []
    assert job.output.count("did you mean train.steps?") == 1  # one report for all ranks
    assert job.output.count("preflight.py ended with 2: not started") == 1


@pytest.mark.gate("slurm")
def test_array_stops_and_requeues(slurm: PrivateSlurm, data: list[str], tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    settings = "method = 'grid'\nprune = {after = 0.1}\nslurm = {nodes = 1, time = 30}"
    path = write_sweep(tmp_path, "ours", settings, "optim.lr = [1e-2, 1e-5]", data)
    conf = slurm.env["SLURM_CONF"]
    process = launched.start(path, "--slurm", PREFLIGHT="0", SLURM_CONF=conf)
    folder = tmp_path / "runs" / "ours"
    first, second = (RunFolder(folder / f"trial-00{number}") for number in range(2))
    try:
        wait_for(lambda: len(first.read_metrics()) > 7, "the first decision", 600)
        job = (folder / "slurm_job").read_text().strip()
        slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_0")
        output = launched.ended(process)
    finally:
        process.kill()
    logs = output + "\n".join(log.read_text() for log in folder.glob("slurm-*.out"))
    assert "2 of 2 trials" in output, logs
    assert "trial 001 | lr=1e-05 | pruned: stopped after 12% of its run" in output  # 4 of 32 steps
    assert [line["step"] for line in first.read_metrics()] == [*range(launched.STEPS + 1)]
    statuses = [run.read_status() or {} for run in (first, second)]
    assert [status["outcome"] for status in statuses] == ["done", "stopped"], logs
    assert [status["attempt"] for status in statuses] == [2, 1], logs
