"""Runs in stages and tensor-parallel ranks: contents, refusals, kills."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.launch.fork_server import Zygote
from harness.launch.ranks import Outcome
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, events
from tests.run.features import Runs, in_gate
from tests.run.test_features import lines_of
from tests.tables import beside

Train = Callable[..., tuple[Outcome, RunFolder]]
MODELS = beside(__file__, "divided.toml")["models"]
TENSORS = "ds.tensor_parallel.autotp_size=2"


@pytest.fixture
def train(zygote: Zygote, data: list[str], tmp_path: Path) -> Train:
    """Return a function that trains a model, by default the small one, in stages until all ranks
    end with a code.
    """

    def run(
        *words: str, model: str = "", defect: str = "", ranks: int = 2, code: int = 0
    ) -> tuple[Outcome, RunFolder]:
        folder, path = RunFolder(tmp_path / "run"), tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model, **MODELS.get(model, {})}))
        named = (f"model.name={path}",) if model else SMALL_MODEL
        stages = f"--deepspeed={REPOSITORY / 'ds_configs' / 'pipeline2.json'}"
        arguments = [stages, *named, *SHORT_RUN, *data, f"run.dir={folder.path}", *words]
        fault = {"defect": defect} if defect else None
        ended = zygote.run(arguments, tmp_path / "logs", fault, ranks)
        assert ended.codes == [code] * ranks, ended.output
        return ended, folder

    return run


@pytest.mark.parametrize("layout", ["stages", in_gate("stages x tensors")])
def test_each_rank_holds_what_was_predicted(layout: str, runs: Runs) -> None:
    run, tensors = runs.whole("plain", layout), 1 + ("tensors" in layout)
    (engine,), (memory,) = events(run, "engine"), events(run, "memory")
    elements = [rank["elements_held"] for rank in engine["ranks"]]
    assert max(elements) < 0.6 / tensors * sum(elements)
    assert {row["rank"] for row in memory["rows"]} == {*range(2 * tensors)}
    batches = 3 * 4 * 2 * (2 * 32 * 8)  # this step and two ahead: ids and labels; not estimated
    for row in memory["rows"]:
        measured = row["measured"] - (batches if row["point"] == "between_steps" else 0)
        assert row["predicted"] == pytest.approx(measured, rel=0.01), row
    for event in events(run, "gradients_agree"):
        assert (event["weights"], event["apart"]) == (2 * 2 + 1, 0.0)  # the norms of two layers
    assert len(events(run, "gradients_agree")) == tensors - 1


def test_stages_that_compute_something_else_are_refused(train: Train) -> None:
    defect, layers = "a stage's layers in the wrong order", "model.overrides.num_hidden_layers=4"
    ended, run = train(layers, defect=defect, code=2)
    assert "does not train correctly in stages" in ended.output
    assert not run.checkpoints_dir.exists()


@pytest.mark.parametrize("stages", [1, in_gate(2)])
def test_tensor_plan_that_omits_a_weight_is_rejected_at_step_1(stages: int, train: Train) -> None:
    words = ("layout.verify=false", f"ds.pipeline.stages={stages}", TENSORS)
    defect = "the gradient of a head's norm not summed"
    ended, run = train(*words, model="qwen3", defect=defect, ranks=2 * stages, code=2)
    assert "tensor-parallel ranks differ, model.layers." in ended.output
    assert "k_norm.weight by" in ended.output
    assert not list(run.checkpoints_dir.glob("step-*"))


@pytest.mark.gate("runs")
def test_tied_weights_of_a_family_with_dropout_keys_are_compared(train: Train) -> None:
    """GPT-2's config names a dropout that its language model lacks."""
    _, run = train("model.dropout=0", model="gpt2")
    (verified,) = events(run, "verified")
    assert verified["grad_norm"] == pytest.approx(lines_of(run)[1]["grad_norm"], rel=1e-5)


@pytest.mark.gate("runs")
def test_underivable_weights_are_rejected_by_all_data_ranks(train: Train) -> None:
    """Of two ranks of a stage, one draws the weights and finds out; the other waits for them."""
    ended, _ = train(model="apertus", ranks=4, code=2)
    assert "uninitialised" in ended.output


@pytest.mark.gate("runs")
def test_four_stages_train_where_verification_is_not_wanted(train: Train) -> None:
    words = ("ds.pipeline.stages=4", "model.overrides.num_hidden_layers=5", "layout.verify=false")
    _, run = train(*words, ranks=4)
    (event,) = events(run, "not_verified")
    assert event["message"] == "layout.verify is false"
    (engine,) = events(run, "engine")
    assert [rank["pipeline_stage"] for rank in engine["ranks"]] == [0, 1, 2, 3]
    assert lines_of(run)[4]["loss"] < lines_of(run)[1]["loss"]
