"""Whole pipelined runs: the same curve, the same export; stopped, resumed, refused."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness.runfolder import RunFolder
from tests.two_ranks import (
    REPOSITORY,
    SHORT_RUN,
    TRAIN,
    Ended,
    Group,
    events,
    run_ranks,
    start,
    train_command,
    wait,
    wait_for,
)

pytestmark = pytest.mark.slow

DS_CONFIGS = REPOSITORY / "ds_configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


def command(data: list[str], run: RunFolder, *more: object) -> list[object]:
    return train_command(
        *data,
        f"--deepspeed={DS_CONFIGS / 'pipeline2.json'}",
        "train.steps=12",
        "save.export=true",
        "sample.tokens=4",
        f"run.dir={run.path}",
        *more,
    )


@pytest.fixture(scope="module")
def undisturbed(folder: Path, data: list[str]) -> RunFolder:
    run = RunFolder(folder / "undisturbed" / "run")
    run_ranks(command(data, run), run.path.parent).succeeded()
    return run


@pytest.fixture(scope="module")
def stopped(folder: Path, data: list[str]) -> tuple[RunFolder, list[Ended]]:
    """A run with dropout, stopped by a signal to the last stage, then gone on with."""
    run = RunFolder(folder / "stopped" / "run")
    group = start(command(data, run, "model.dropout=0.1"), run.path.parent)
    wait_for(partial(has_trained, run, group), "the first step")
    group.processes[1].send_signal(signal.SIGUSR1)
    attempts = [wait(group)]
    attempts.append(run_ranks(command(data, run, "model.dropout=0.1"), run.path.parent))
    return run, attempts


def has_trained(run: RunFolder, group: Group) -> bool:
    return group.ended or any("loss" in line for line in run.read_metrics())


def curve(run: RunFolder) -> list[tuple[int, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"]) for m in run.read_metrics() if "loss" in m]


def test_the_curve_and_the_export_are_those_of_the_unsplit_run(
    undisturbed: RunFolder, folder: Path, data: list[str]
) -> None:
    unsplit = RunFolder(folder / "unsplit" / "run")
    run_ranks(command(data, unsplit, "ds.pipeline.stages=1"), unsplit.path.parent, ranks=1)
    for found, expected in zip(curve(undisturbed), curve(unsplit), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    exports = [load_file(run.export_dir / "model.safetensors") for run in (undisturbed, unsplit)]
    assert exports[0].keys() == exports[1].keys()
    for name, tensor in exports[1].items():
        assert (exports[0][name] - tensor).norm() < 1e-4 * tensor.norm(), name
    configs = [(run.export_dir / "config.json").read_text() for run in (undisturbed, unsplit)]
    assert configs[0] == configs[1]
    AutoModelForCausalLM.from_pretrained(undisturbed.export_dir)


def test_a_pipelined_run_compares_its_first_batch_with_the_unsplit_model(
    undisturbed: RunFolder,
) -> None:
    (verified,) = events(undisturbed, "verified")
    _, loss, norm = curve(undisturbed)[0]
    assert verified["loss"] == pytest.approx(loss, rel=1e-6)
    assert verified["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_each_rank_says_which_stage_ran_and_holds_its_part(undisturbed: RunFolder) -> None:
    (event,) = events(undisturbed, "engine")
    assert [rank["pipeline_stage"] for rank in event["ranks"]] == [0, 1]
    held = [rank["elements_held"] for rank in event["ranks"]]
    assert max(held) < 0.6 * sum(held)


def test_what_each_stage_holds_is_what_was_predicted(undisturbed: RunFolder) -> None:
    (event,) = events(undisturbed, "memory")
    assert {row["rank"] for row in event["rows"]} == {0, 1}
    batches = 3 * 4 * 2 * (2 * 32 * 8)  # of this step and two ahead: ids and labels; no estimate
    for row in event["rows"]:
        held = row["measured"] - (batches if row["point"] == "between_steps" else 0)
        assert row["predicted"] == pytest.approx(held, rel=0.01), row


def test_a_stopped_run_goes_on_bit_for_bit_on_the_same_stages(
    stopped: tuple[RunFolder, list[Ended]], folder: Path, data: list[str]
) -> None:
    run, attempts = stopped
    assert [ended.codes for ended in attempts] == [[75, 75], [0, 0]], attempts[0].output
    whole = RunFolder(folder / "whole" / "run")
    run_ranks(command(data, whole, "model.dropout=0.1"), whole.path.parent).succeeded()
    assert curve(run) == curve(whole)
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))


def test_with_dropout_only_the_loss_can_be_compared(
    stopped: tuple[RunFolder, list[Ended]],
) -> None:
    (verified,) = events(stopped[0], "verified")  # and not once more after resuming
    assert verified["grad_norm"] == "not compared: steps are random"


def test_a_run_goes_on_without_its_stages(
    undisturbed: RunFolder, folder: Path, data: list[str]
) -> None:
    unsplit = RunFolder(folder / "unsplit-again")
    shutil.copytree(undisturbed.path, unsplit.path)
    for run, *more in ((undisturbed,), (unsplit, "ds.pipeline.stages=1")):
        words = command(data, run, "train.steps=13", "optim.schedule=constant", *more)
        run_ranks([*words, "resume.allow=optim.schedule"], folder / "again").succeeded()
    (_, loss, norm), (_, unsplit_loss, unsplit_norm) = curve(undisturbed)[-1], curve(unsplit)[-1]
    assert unsplit_loss == pytest.approx(loss, rel=1e-6)
    assert unsplit_norm == pytest.approx(norm, rel=1e-5)


def test_stages_that_compute_something_else_are_refused(folder: Path, data: list[str]) -> None:
    run = RunFolder(folder / "swapped" / "run")
    _, _, *arguments = command(data, run, "model.overrides.num_hidden_layers=4")
    words = [sys.executable, "-m", "tests.run.swapped_layers", *arguments]
    ended = run_ranks(words, run.path.parent)
    assert ended.codes == [2, 2], ended.output
    assert "does not train right in stages" in ended.output
    assert not run.checkpoints_dir.exists()


def test_tied_weights_of_a_family_with_dropout_keys_are_compared(
    folder: Path, data: list[str]
) -> None:
    """GPT-2's config names a dropout that its language model does not have."""
    run = RunFolder(folder / "gpt2" / "run")
    sizes = {"vocab_size": 8192, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    (folder / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    words = [
        *(sys.executable, TRAIN, *SHORT_RUN, *data, f"--deepspeed={DS_CONFIGS / 'pipeline2.json'}"),
        *(f"model.name={folder / 'gpt2.json'}", "model.dropout=0", f"run.dir={run.path}"),
    ]
    run_ranks(words, run.path.parent).succeeded()
    (verified,) = events(run, "verified")
    assert verified["grad_norm"] == pytest.approx(curve(run)[0][2], rel=1e-5)


def test_weights_that_cannot_be_drawn_are_refused_by_all_data_ranks(
    folder: Path, data: list[str]
) -> None:
    """Of two ranks of a stage one draws, and finds out; the other waits for the weights."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    (folder / "apertus.json").write_text(json.dumps({"model_type": "apertus", **sizes}))
    words = [
        *(sys.executable, TRAIN, *SHORT_RUN, *data, f"--deepspeed={DS_CONFIGS / 'pipeline2.json'}"),
        *(f"model.name={folder / 'apertus.json'}", f"run.dir={folder / 'none'}"),
    ]
    ended = wait(start(words, folder / "apertus", ranks=4), timeout_s=120)
    assert ended.codes == [2] * 4, ended.output
    assert "uninitialised" in ended.output


def test_four_stages_train_where_verification_is_not_wanted(folder: Path, data: list[str]) -> None:
    run = RunFolder(folder / "four" / "run")
    words = command(
        data,
        run,
        f"--deepspeed={DS_CONFIGS / 'pipeline4.json'}",
        "model.overrides.num_hidden_layers=5",
        "layout.verify=false",
        "train.steps=4",
    )
    run_ranks(words, run.path.parent, ranks=4).succeeded()
    (told,) = events(run, "not_verified")
    assert told["message"] == "layout.verify is false"
    (engine,) = events(run, "engine")
    assert [rank["pipeline_stage"] for rank in engine["ranks"]] == [0, 1, 2, 3]
    assert curve(run)[-1][1] < curve(run)[0][1]
