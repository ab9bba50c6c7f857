"""Whole runs with bad steps, judged only by the run folder."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.batch import Curriculum
from harness.data.batch_text import first_sample_of
from harness.launch.fork_server import Zygote
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, events, run_ranks
from tests.shipped import DS_CONFIGS

BATCH = 8
# Short enough for a test: no judgement for four steps, and only extreme values are spikes.
WATCHED = ("train.steps=16", "guard.spike_window=16", "guard.spike_sigma=12", "save.every=5")

Run = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def spoiled(zygote: Zygote, data: list[str]) -> Run:
    """Return a function that trains in a folder with spoils (plant.py) and arguments, until all
    ranks end with a code.
    """

    def train(
        folder: Path, spoils: dict[str, Any], *more: str, ranks: int = 2, code: int = 0
    ) -> RunFolder:
        words = [*SMALL_MODEL, *SHORT_RUN, *data, f"run.dir={folder / 'run'}", *more]
        ended = zygote.run(words, folder, {"spoil": spoils}, ranks)
        assert ended.codes == [code] * ranks, ended.output
        return RunFolder(folder / "run")

    return train


def zero(stage: object) -> str:
    return f"--deepspeed={DS_CONFIGS / f'zero{stage}.json'}"


def metrics(run: RunFolder) -> list[tuple[Any, ...]]:
    """Return the learned values of a run's steps."""
    names = ("step", "samples", "loss", "grad_norm", "skipped_steps", "eval_loss")
    return [tuple(line.get(name) for name in names) for line in run.read_metrics()]


def first_sample(step: int) -> str:
    return str((step - 1) * BATCH)


def test_repeated_nan_losses_exit_with_code_76_and_a_diagnosis(spoiled: Run, tmp_path) -> None:
    spoils = {"loss": {first_sample(step): "nan" for step in (2, 4, 5, 6)}}
    run = spoiled(tmp_path, spoils, zero(2), "train.steps=8", "guard.max_bad_steps=3", code=76)
    status = run.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("diverged", 76, 6)
    (event,) = events(run, "diverged")
    assert "3 steps in a row were skipped (guard.max_bad_steps)" in event["message"]
    assert "the last because the loss is not finite" in event["message"]
    assert "The weights are those of step 3" in event["message"]
    skipped = events(run, "skipped_step")
    assert [(e["step"], e["reason"]) for e in skipped] == [
        (step, "the loss is not finite") for step in (2, 4, 5, 6)
    ]
    assert run.read_metrics()[-1]["skipped_steps"] == 4


@pytest.mark.gate("faults")
def test_nonfinite_held_out_loss_exits_with_code_76(spoiled: Run, tmp_path: Path) -> None:
    run = spoiled(tmp_path, {"ruin": 2}, zero(0), "train.steps=4", ranks=1, code=76)
    (event,) = events(run, "diverged")
    assert "the held-out loss is not finite" in event["message"]


def test_a_logged_spike_is_an_event_and_nothing_else(spoiled: Run, tmp_path: Path) -> None:
    run = spoiled(tmp_path, {"loss": {first_sample(9): 1e4}}, zero(1), *WATCHED)
    (event,) = events(run, "spike")
    assert (event["step"], event["samples"], event["policy"]) == (9, [64, 72], "log")
    assert event["value"] > event["mean"] + 12 * event["sigma"]
    assert events(run, "skipped_step") == []


@pytest.fixture(scope="module")
def skipping(spoiled: Run, tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Return the same run twice; the second one is interrupted."""
    arguments = (zero(2), *WATCHED, "guard.spikes=skip", "optim.schedule=constant")
    spoils = {"loss": {first_sample(9): 1e4}}
    runs = []
    for name, lengths in (("whole", (16,)), ("halves", (6, 16))):
        folder = tmp_path_factory.mktemp(name)
        for steps in lengths:
            length = f"train.steps={steps}"
            run = spoiled(folder, spoils, *arguments, length)
        runs.append(run)
    return runs


@pytest.mark.gate("faults")
def test_spike_step_is_skipped(skipping: list[RunFolder]) -> None:
    whole, _ = skipping
    (spike,) = events(whole, "spike")
    (skipped,) = events(whole, "skipped_step")
    assert spike["step"] == skipped["step"] == 9
    assert skipped["reason"] == "a spike of loss"
    last = whole.read_metrics()[-1]
    assert last["skipped_steps"] == 1
    assert last["loss"] < whole.read_metrics()[1]["loss"]


@pytest.mark.gate("faults")
def test_a_resumed_run_skips_the_same_steps(skipping: list[RunFolder]) -> None:
    whole, halves = skipping
    (spike,), (other,) = events(whole, "spike"), events(halves, "spike")
    assert {**spike, "time": 0, "attempt": 0} == {**other, "time": 0, "attempt": 0}
    assert [line[:5] for line in metrics(whole)] == [line[:5] for line in metrics(halves)]


@pytest.mark.gate("faults")
def test_tensor_ranks_skip_a_spike_alike(spoiled: Run, tmp_path: Path) -> None:
    """Only one of them has a wrong loss: on their own they would decide differently."""
    spoils = {"loss": {first_sample(9): 1e4}}
    run = spoiled(
        *(tmp_path, spoils, zero(1), *WATCHED, "guard.spikes=skip", "train.steps=11"),
        *("ds.tensor_parallel.autotp_size=2", "guard.replicas_every=1"),
    )
    (spike,), (skipped,) = events(run, "spike"), events(run, "skipped_step")
    assert spike["step"] == skipped["step"] == 9
    assert spike["quantity"] == "loss"  # on rank 0 too, whose own loss is normal
    assert [event["step"] for event in events(run, "replicas_equal")][8:11] == [9, 10, 11]


@pytest.fixture(scope="module")
def rolled_back(spoiled: Run, tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Return the same run twice, with two spikes."""
    spoils = {"loss": {first_sample(9): 1e4, first_sample(18): 1e4}}
    runs = []
    for name in ("first", "second"):
        words = (zero(2), *WATCHED, "guard.spikes=rollback")
        runs.append(spoiled(tmp_path_factory.mktemp(name), spoils, *words))
    return runs


@pytest.mark.gate("faults")
def test_rollback_restores_checkpoint_and_skips_read_samples(rolled_back: list[RunFolder]) -> None:
    run = rolled_back[0]
    first, second = events(run, "rollback")
    # Step 9 read samples 64 to 72; from step 5 on, the run continues with those after them.
    assert (first["from_step"], first["to_step"]) == (9, 5)
    assert first["samples_skipped"] == [40, 72]
    # Samples 136 to 144 are then those of step 14, and the checkpoint is that of step 10.
    assert (second["from_step"], second["to_step"]) == (14, 10)
    assert second["samples_skipped"] == [112, 144]
    assert [event["step"] for event in events(run, "spike")] == [9, 14]
    lines = {line["step"]: line for line in run.read_metrics()}
    assert sorted(lines) == list(range(17))
    assert lines[6]["samples"] == 80
    assert lines[16]["samples"] == 144 + 6 * BATCH
    assert lines[16]["tokens"] == lines[16]["samples"] * 32
    assert all(math.isfinite(line["loss"]) for line in list(lines.values())[1:])
    assert lines[16]["loss"] < lines[1]["loss"]


@pytest.mark.gate("faults")
def test_the_same_run_goes_back_in_the_same_way(rolled_back: list[RunFolder]) -> None:
    assert metrics(rolled_back[0]) == metrics(rolled_back[1])


@pytest.mark.gate("faults")
@pytest.mark.parametrize("json", ["zero3", "zero2_offload", "zero3_offload", "pipeline2"])
def test_every_layout_goes_back_to_what_it_saved(spoiled: Run, tmp_path: Path, json: str) -> None:
    spoils = {"loss": {first_sample(9): 1e4}}
    words = (f"--deepspeed={DS_CONFIGS / json}.json", *WATCHED, "guard.spikes=rollback")
    run = spoiled(tmp_path, spoils, *words, "train.steps=12", "eval.every=5")
    (event,) = events(run, "rollback")
    assert (event["from_step"], event["to_step"]) == (9, 5)
    lines = {line["step"]: line for line in run.read_metrics()}
    assert lines[12]["loss"] < lines[1]["loss"]
    assert lines[12]["eval_loss"] < lines[5]["eval_loss"]


@pytest.mark.gate("faults")
def test_a_step_is_shown_past_the_samples_left_out(rolled_back: list[RunFolder], tmp_path) -> None:
    run = rolled_back[0]
    for step, first in ((5, 32), (6, 72), (10, 104), (11, 144), (16, 184)):
        assert first_sample_of(run.read_events(), step, Curriculum(BATCH)) == first, step
    # A run that was killed before the next checkpoint, and now only logs spikes.
    killed = [*run.read_events()[:-1], {"kind": "resumed", "step": 10}]
    assert first_sample_of(killed, 11, Curriculum(BATCH)) == 112
    command = [sys.executable, REPOSITORY / "tools" / "show_batch.py", run.path, "--step", "11"]
    ended = run_ranks(command, tmp_path, ranks=1).succeeded()
    assert "step 11: windows 144 to 151" in ended.output


@pytest.mark.gate("faults")
def test_the_minimum_loss_scale_is_a_reason_to_go_back(spoiled: Run, tmp_path: Path) -> None:
    scale = ("ds.fp16.initial_scale_power=3", "ds.fp16.hysteresis=1", "ds.fp16.min_loss_scale=8")
    run = spoiled(
        *(tmp_path, {"loss": {first_sample(7): "inf"}}),
        *(f"--deepspeed={DS_CONFIGS / 'fp16.json'}", *scale, *WATCHED, "guard.spikes=rollback"),
        *("train.steps=8",),
        ranks=1,
    )
    (event,) = events(run, "rollback")
    assert event["samples_skipped"] == [40, 56]
    assert "fell to its minimum" in event["why"]


def test_a_silently_differing_rank_stops_the_run_before_it_saves(spoiled: Run, tmp_path) -> None:
    run = spoiled(
        *(tmp_path, {"flip": 7}),
        *(zero(0), "train.steps=12", "save.every=5", "guard.replicas_every=4"),
        code=1,
    )
    assert (run.read_status() or {})["outcome"] == "failed"
    (event,) = events(run, "replicas_differ")
    assert event["step"] == 8
    assert event["ranks_by_parameter"]["lm_head.weight"] == [0, 1]
    failures = [event["message"] for event in events(run, "failed")]
    assert all("step-00000005 predates this" in message for message in failures)
    assert [event["step"] for event in events(run, "replicas_equal")] == [4, 5]


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.gate("faults")
@pytest.mark.parametrize(
    ("ranks", "stage", "more", "weight", "differing", "named"),
    [
        (4, 1, (), NORM, [3], "rank 3 (data 1, tensor 1): suspect faulty"),
        # One data rank, whose shards are whole weights, and partitioned weights.
        (2, 3, ("ds.zero_optimization.stage3_param_persistence_threshold=0",), NORM, [0, 1], ""),
        # Tied ends of a pipeline: no other rank has this part.
        (4, 1, ("ds.pipeline.stages=2",), "model.embed_tokens.weight", [1, 3], ""),
    ],
    ids=["tensor2_data2", "tensor2_zero3", "tied_ends"],
)
def test_tensor_ranks_and_ends_of_a_pipeline_are_compared(
    *,
    ranks: int,
    stage: int,
    more: tuple[str, ...],
    weight: str,
    differing: list[int],
    named: str,
    spoiled: Run,
    tmp_path: Path,
) -> None:
    run = spoiled(
        *(tmp_path, {"flip": 2, "weight": weight}, zero(stage), *more),
        *("ds.tensor_parallel.autotp_size=2", "model.overrides.tie_word_embeddings=true"),
        *("guard.replicas_every=1", "layout.verify=false"),
        ranks=ranks,
        code=1,
    )
    (equal,), (event,) = events(run, "replicas_equal"), events(run, "replicas_differ")
    assert (equal["step"], event["step"]) == (1, 2)
    assert event["ranks_by_parameter"] == {weight: differing}
    (message,) = {event["message"] for event in events(run, "failed")}
    assert f"{weight} on {named}" in message
    assert ("no majority" in message) == (not named)
