"""Whole runs: harness/train.py on real ranks, judged only by the run folder."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.launch.ranks import Outcome, free_port
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, environment, events, run_ranks, train_command
from tests.shipped import DS_CONFIGS
from tests.tables import beside

TABLES = beside(__file__, "loop.toml")
STEPS = 12


def opened(data: list[str]) -> Data:
    """Return the data that the arguments name."""
    path, cache = (argument.partition("=")[2] for argument in data)
    config = DataConfig(path=path, cache_dir=cache, seq_len=32)
    return build_data(DataSpec(config, model_vocab_size=512))


def stochastic(data: list[str], run_dir: Path, *more: object) -> list[object]:
    """Return the command of a run with dropout, accumulation and a changing rate."""
    return train_command(
        *(*data, f"--deepspeed={DS_CONFIGS / 'zero2.json'}", "model.dropout=0.1"),
        *(f"train.steps={STEPS}", "optim.warmup_steps=4", "eval.every=5", "save.export=true"),
        *(f"run.dir={run_dir}", *more),
    )


@pytest.fixture(scope="module")
def undisturbed(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(stochastic(data, folder / "run"), folder).succeeded()
    return RunFolder(folder / "run")


def raw_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """Return every line ever written, including those of repeated steps."""
    return [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]


def one_rank(tmp_path: Path, data: list[str], *arguments: object) -> Outcome:
    command = train_command(*data, f"run.dir={tmp_path / 'run'}", *arguments)
    return run_ranks(command, tmp_path / "log", ranks=1)


def test_every_step_has_all_metrics(undisturbed: RunFolder) -> None:
    lines = undisturbed.read_metrics()
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line.keys() >= {*TABLES["metrics"]} for line in lines[1:])
    last, times = lines[-1], [line["unix_time_s"] for line in lines]
    assert (last["samples"], last["tokens"]) == (STEPS * 8, STEPS * 8 * 32)
    assert last["tokens_per_s"] == pytest.approx(8 * 32 / last["step_time_s"])
    assert times == sorted(times)
    assert 0 < time.time() - times[-1] < 24 * 3600


def test_a_run_learns_and_says_how_it_ended(undisturbed: RunFolder) -> None:
    """The held-out loss is measured at the start, when due, and at the end."""
    losses = {m["step"]: m["eval_loss"] for m in undisturbed.read_metrics() if "eval_loss" in m}
    assert [*losses] == [0, 5, 10, STEPS]
    assert losses[STEPS] < losses[0] - 1
    status = undisturbed.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("done", 0, STEPS)


def test_memory_in_use_equals_the_estimate(undisturbed: RunFolder) -> None:
    (event,) = events(undisturbed, "memory")
    assert event["step"] == 3
    assert [(row["rank"], row["point"]) for row in event["rows"]] == [
        (rank, point) for rank in (0, 1) for point in ("built", "between_steps")
    ]
    for row in event["rows"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.01), row
    assert (undisturbed.read_plan() or {})["estimate"]["peak_phase"]


def test_another_rate_is_refused(undisturbed: RunFolder, data: list[str], tmp_path: Path) -> None:
    other = stochastic(data, undisturbed.path, "optim.lr=1e-4")
    refused = run_ranks(other, tmp_path / "refused")
    assert refused.codes == [2, 2]
    assert "optim.lr is 0.0001, but the run in this folder has" in refused.output
    before = raw_metrics(undisturbed)
    allowed = run_ranks([*other, "resume.allow=optim.lr"], tmp_path / "allowed")
    assert allowed.codes == [0, 0], allowed.output
    # A finished run that is started again does nothing.
    assert raw_metrics(undisturbed) == before
    (resumed,) = events(undisturbed, "resumed")
    assert [change["was"] for change in resumed["changes"] if change["key"] == "optim.lr"] == [3e-3]
    fewer = run_ranks(stochastic(data, undisturbed.path, "train.steps=3"), tmp_path / "fewer")
    assert fewer.codes == [2, 2]
    assert f"newest checkpoint is from step {STEPS}: raise train.steps" in fewer.output


def test_no_steps_at_all_export_the_initial_weights(data: list[str], tmp_path: Path) -> None:
    one_rank(tmp_path, data, "train.steps=0", "save.export=true").succeeded()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export", dtype=torch.float32)
    plan = RunFolder(tmp_path / "run").read_plan() or {}
    fresh = skeleton(hf_config(plan["model_config"]), torch.float32)
    materialize(fresh, 0, torch.device("cpu"))
    for name, parameter in fresh.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter), name


@pytest.fixture(scope="module")
def overflowing(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run over a part of an epoch in fp16, at a scale that overflows at first."""
    folder = tmp_path_factory.mktemp("overflowing")
    run_ranks(
        [
            *without_steps(train_command(*data)),
            f"--deepspeed={DS_CONFIGS / 'fp16.json'}",
            *("ds.fp16.initial_scale_power=32", "ds.fp16.hysteresis=1"),
            *("train.epochs=0.05", f"run.dir={folder / 'run'}"),
        ],
        folder,
        ranks=1,
    ).succeeded()
    return RunFolder(folder / "run")


def without_steps(command: list[object]) -> list[object]:
    return [word for word in command if not str(word).startswith("train.steps=")]


def test_an_overflow_is_an_event_and_the_run_goes_on(overflowing: RunFolder) -> None:
    skipped = events(overflowing, "skipped_step")
    last = overflowing.read_metrics()[-1]
    assert skipped[0]["step"] == 1
    assert last["skipped_steps"] == len(skipped) >= 1
    assert last["loss_scale"] < 2**32


def test_a_length_in_epochs_is_rounded_up_to_steps(overflowing: RunFolder, data: list[str]) -> None:
    samples = opened(data).train.samples
    assert (overflowing.read_status() or {})["step"] == -(-samples * 5 // (100 * 8))


@pytest.mark.gate("runs")
def test_oom_forecast_blocks_unless_forced(tmp_path: Path) -> None:
    cache = [f"data.cache_dir={tmp_path / 'cache'}"]
    refused = one_rank(tmp_path, cache, *TABLES["too_long"])
    assert refused.codes == [2]
    assert "of host memory, but" in refused.output
    assert "data.seq_len=" in refused.output
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()
    forced = one_rank(tmp_path, cache, *TABLES["too_long"], "plan.force=true")
    assert forced.codes == [1], forced.output
    assert "rank 0 ran out of memory after step 0" in forced.output
    assert "data.seq_len=" in forced.output
    run = RunFolder(tmp_path / "run")
    assert len(events(run, "forced")) == len(events(run, "out_of_memory")) == 1
    assert (run.read_status() or {})["outcome"] == "failed"


@pytest.mark.slow("three processes import everything, from a clone without compiled files")
def test_launcher_needs_no_pip(data: list[str], tmp_path: Path) -> None:
    clone = tmp_path / "harness-clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ("--num_accelerators=2", f"--master_port={free_port()}")
    command = [launcher, *options, clone / "harness" / "train.py"]
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [*command, *train_command()[2:], *data, f"run.dir={run_dir}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = RunFolder(run_dir).read_plan() or {}
    assert Path(plan["deepspeed_source"]).is_relative_to(clone)
    assert plan["world"]["world_size"] == 2
    assert (RunFolder(run_dir).read_status() or {})["outcome"] == "done"
