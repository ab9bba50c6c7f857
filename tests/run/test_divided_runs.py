"""Whole runs of pipeline x tensor parallelism: the same curve and export; killed, gone on with as
ZeRO 3 and back; a division that forgets a weight is refused.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness.runfolder import RunFolder
from tests.two_ranks import (
    SHORT_RUN,
    Group,
    events,
    run_ranks,
    start,
    train_command,
    wait,
    wait_for,
)

pytestmark = pytest.mark.slow

DIVIDED = ("ds.pipeline.stages=2", "ds.tensor_parallel.autotp_size=2")
ZERO3 = ("ds.zero_optimization.stage=3",)


def command(data: list[str], run: RunFolder, *more: str) -> list[object]:
    return train_command(
        *(*data, "train.steps=12", "save.every=2", "save.keep=9", "save.export=true"),
        *(f"run.dir={run.path}", *more),
    )


def curve(run: RunFolder) -> list[tuple[int, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"]) for m in run.read_metrics() if "loss" in m]


def assert_alike(run: RunFolder, other: RunFolder) -> None:
    for line, expected in zip(curve(run), curve(other), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def alone(folder: Path, data: list[str]) -> RunFolder:
    run = RunFolder(folder / "alone" / "run")
    run_ranks(command(data, run), run.path.parent, ranks=1).succeeded()
    return run


@pytest.fixture(scope="module")
def divided(folder: Path, data: list[str]) -> RunFolder:
    run = RunFolder(folder / "divided" / "run")
    run_ranks(command(data, run, *DIVIDED), run.path.parent, ranks=4).succeeded()
    return run


def test_the_curve_and_the_export_are_those_of_one_rank(
    divided: RunFolder, alone: RunFolder
) -> None:
    assert_alike(divided, alone)
    one, other = (load_file(run.export_dir / "model.safetensors") for run in (divided, alone))
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert (one[name] - tensor).norm() < 1e-4 * tensor.norm(), name


def test_the_first_batch_and_the_ranks_gradients_are_compared(divided: RunFolder) -> None:
    (verified,), (agree,) = events(divided, "verified"), events(divided, "gradients_agree")
    _, loss, norm = curve(divided)[0]
    assert verified["loss"] == pytest.approx(loss, rel=1e-6)
    assert verified["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (agree["weights"], agree["apart"]) == (2 * 2 + 1, 0.0)  # the norms of two layers


def test_each_rank_holds_what_was_predicted(divided: RunFolder) -> None:
    (engine,), (memory,) = events(divided, "engine"), events(divided, "memory")
    assert [rank["pipeline_stage"] for rank in engine["ranks"]] == [0, 0, 1, 1]
    assert {row["rank"] for row in memory["rows"]} == {0, 1, 2, 3}
    batches = 3 * 4 * 2 * (2 * 32 * 8)  # of this step and two ahead: ids and labels; no estimate
    for row in memory["rows"]:
        measured = row["measured"] - (batches if row["point"] == "between_steps" else 0)
        assert row["predicted"] == pytest.approx(measured, rel=0.01), row


@pytest.mark.parametrize("data_ranks", [1, pytest.param(2, marks=pytest.mark.gate("runs"))])
def test_a_killed_run_goes_on_as_zero_3_and_back(
    data_ranks: int, divided: RunFolder, folder: Path, data: list[str]
) -> None:
    """Of two stages x data ranks x two tensor ranks."""
    run = RunFolder(folder / f"killed-{data_ranks}" / "run")
    for layout, ranks, step in ((DIVIDED, 4 * data_ranks, 3), (ZERO3, 2, 7)):
        group = start(command(data, run, *layout), run.path.parent, ranks=ranks)
        wait_for(partial(has_reached, run, group, step), f"step {step}")
        group.processes[ranks - 1].send_signal(signal.SIGKILL)
        assert 0 not in wait(group).codes
    run_ranks(command(data, run, *DIVIDED), run.path.parent, ranks=4 * data_ranks).succeeded()
    resumed = events(run, "resumed")
    assert len(resumed) == 2
    assert all("deepspeed" in {change["key"] for change in event["changes"]} for event in resumed)
    assert_alike(run, divided)


def has_reached(run: RunFolder, group: Group, step: int) -> bool:
    """Return True once a checkpoint of a step, or of a later one, can be resumed."""
    saved = [int(path.name.removeprefix("step-")) for path in run.checkpoints_dir.glob("step-*")]
    return group.ended or any(number >= step for number in saved)


def test_a_checkpoint_is_gone_on_with_bit_for_bit(
    divided: RunFolder, folder: Path, data: list[str]
) -> None:
    run = RunFolder(folder / "again" / "run")
    shutil.copytree(divided.path, run.path)
    for path in sorted(run.checkpoints_dir.glob("step-*"))[3:]:
        shutil.rmtree(path)
    run_ranks(command(data, run, *DIVIDED), run.path.parent, ranks=4).succeeded()
    assert curve(run) == curve(divided)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_that_forgets_a_weight_is_refused_after_the_first_backward_pass(
    stages: int, folder: Path, data: list[str]
) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    (folder / "qwen3.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    run = RunFolder(folder / f"forgotten-{stages}" / "run")
    words = [
        *(sys.executable, "-m", "tests.run.forgotten_norms", *SHORT_RUN, *data),
        *(f"model.name={folder / 'qwen3.json'}", f"run.dir={run.path}", "layout.verify=false"),
        *(f"ds.pipeline.stages={stages}", "ds.tensor_parallel.autotp_size=2"),
    ]
    ended = run_ranks(words, run.path.parent, ranks=2 * stages)
    assert ended.codes == [2] * (2 * stages), ended.output
    assert "tensor-parallel ranks should have alike differ, model.layers." in ended.output
    assert "k_norm.weight by" in ended.output
    assert not list(run.checkpoints_dir.glob("step-*"))
