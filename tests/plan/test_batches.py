"""Batches, ramps, epochs, lengths, chunks of a loss and carried states, as decided by a plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.layout.state_size import CARRIED
from harness.models.recurrent_state import WINDOWS
from harness.plan import batches
from harness.plan.batches import length_events, open_keys, repetition_events, steps_of
from harness.plan.plan import Counts, Plan
from harness.plan.text import settled, summary
from harness.run.dry_run import dry_run
from tests.engine.small import MODEL
from tests.plan.plans import Planner
from tests.tables import beside

CHATS = Counts(examples=294, windows=28, is_masked=True)
START = "data.seq_len=16 model.init_from=$small"
"""A run that starts from given weights."""


def of(made: Plan) -> tuple[int, float | None]:
    """Return the batch and the epochs."""
    assert made.global_batch == made.config.train.global_batch
    return made.global_batch, made.config.train.epochs


def test_text_is_read_once_where_that_is_enough(planned: Planner) -> None:
    for counts, decided in (((9, 40_000), (48, 1)), ((9, 1_000), (8, 1)), ((1, 20), (8, 15))):
        of_text = Counts(*counts, is_masked=False)
        assert of(planned(START, estimate=False, counts=of_text)) == decided


@pytest.mark.parametrize(("windows", "batch"), [(997, 8), (1000, 8), (7, 1), (4_801, 48)])
def test_no_more_is_read_than_a_mixture_has(windows: int, batch: int, planned: Planner) -> None:
    counts = Counts(10 * windows, windows, is_masked=True, most_windows=windows)
    made = planned(START, estimate=False, counts=counts)
    steps = steps_of(made, counts)
    assert made.global_batch == batch
    assert windows - batch < made.curriculum.samples_after(steps) <= windows


def test_random_weights_keep_batch_and_length(planned: Planner) -> None:
    made = planned("train.epochs=2", estimate=False, counts=CHATS)
    assert of(made) == (48, 2)
    assert open_keys(made.config) == set()


def test_a_batch_is_no_smaller_than_the_ranks_need(planned: Planner) -> None:
    many = planned(f"RANKS=64 EXAMPLES=1000 WINDOWS=300 {START}", estimate=False)
    (why,) = [event["message"] for event in many.events if event["kind"] == "follows_data"]
    assert "the ranks need at least 64 windows per step" in why
    assert planned(f"RANKS=3 {START}", estimate=False, counts=batches.SMALLEST).global_batch == 3


def test_the_plan_says_what_follows_and_why(planned: Planner) -> None:
    before = planned(START)
    assert "48 windows per step = " in (text := summary(before))
    assert "16 tokens each; fewer if the data is small" in text
    assert "about 3 epochs; the number of steps is known once the data is counted" in text
    assert "cosine, at most 0.0026 after a warm-up of 0.03 of all steps" in text
    made = planned(START, counts=CHATS)
    lines = settled(made, CHATS, before).splitlines()
    assert [line[15:] for line in lines[:3]] == [
        "1 window per step = micro-batch 1 x 1 accumulated x 1 data ranks, 16 tokens each",
        "112 steps = 1,792 tokens: 294 examples in 28 windows of 16 tokens, 1 window per step, "
        "4 epochs",
        "cosine: 0.00065 at step 1, 0.0026 at step 4, 0.00026 at step 112",
    ]
    assert lines[-1][15:] == (
        "train.global_batch=1, train.epochs=4: 48 windows per step would make 2 steps of 3 epochs, "
        "fewer than 100 (docs/models.md#fine-tuning)"
    )
    assert made.estimate.cpu_bytes_per_node < before.estimate.cpu_bytes_per_node


def test_a_dry_run_counts_roughly(planned: Planner, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "what is 1 plus 2?"}]
    turns.append({"role": "assistant", "content": "1 plus 2 is 3."})
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 300)
    text = dry_run(planned(f"{START} data.path={tmp_path / 'chats.jsonl'}"), True).text()
    assert "tokens: roughly 294 examples in " in text
    assert "300 documents, 0.0 MiB (roughly 5,700 tokens)" in text  # its tokenizer is elsewhere
    assert "8 windows per step = micro-batch 8 x 1 accumulated" in text
    assert "roughly 300 of 300 documents (100.0%) are longer than data.seq_len = 16 tokens" in text
    padded = f"{START} data.path={tmp_path / 'chats.jsonl'} data.batching=padded"
    text = dry_run(planned(padded), True).text()
    assert "roughly 294 examples, 8 examples per step, 3.02 epochs" in text


def test_a_run_that_repeats_its_data_too_often_says_so(planned: Planner) -> None:
    counts = Counts(9, 1_000, is_masked=False)
    lengths = (("train.steps=333", 333), ("train.tokens=9e9", 1_464_844), ("train.epochs=30", 625))
    plans = ((planned(words, estimate=False), steps) for words, steps in lengths)
    few, many, asked_for = (repetition_events(made, steps, counts) for made, steps in plans)
    assert few == asked_for == []
    (event,) = many
    assert "reads its data 70,313 times" in event["message"]
    assert event["message"].endswith("give data.path more text, or lower train.tokens")


@pytest.mark.parametrize(("words", "remedy"), beside(__file__, "batches.toml")["too_much"])
def test_batch_larger_than_the_epochs_is_said(words: str, remedy: str, planned: Planner) -> None:
    counts = Counts(4, 4, is_masked=False)
    made = planned(words, estimate=False)
    events = repetition_events(made, steps_of(made, counts), counts)
    assert len(events) == bool(remedy)
    assert all(remedy.strip(".") in event["message"] for event in events)


def test_a_run_too_short_to_learn_says_so_with_the_keys(planned: Planner) -> None:
    words = "train.global_batch=48 train.epochs=3 optim.lr=2e-3"
    made = planned(f"{START} {words} optim.warmup_steps=20", estimate=False, counts=CHATS)
    steps = steps_of(made, CHATS)
    assert steps == 2
    warmup, few = length_events(made.config, steps)
    assert (warmup["kind"], few["kind"]) == ("unfinished_warmup", "few_steps")
    assert "ends during its warm-up (20 steps, optim.warmup_steps)" in warmup["message"]
    assert "set optim.warmup_ratio=0.03" in warmup["message"]
    assert "takes only 2 steps" in few["message"]
    assert "lower train.global_batch (now 48), or raise train.epochs" in few["message"]
    kinds = [event["kind"] for event in length_events(made.config, 19)]
    assert kinds == ["unfinished_warmup", "few_steps"]
    assert length_events(made.config, 20) == length_events(made.config, batches.LEAST_STEPS) == []
    by_tokens = planned("train.tokens=9000 optim.warmup_steps=1", estimate=False)
    (event,) = by_tokens.events
    assert "takes only 2 steps" in event["message"]
    assert event["message"].endswith("or raise train.tokens")
    # A run with ten requested steps takes ten.
    assert planned("train.steps=10 optim.warmup_steps=1", estimate=False).events == ()


def test_a_pipeline_says_how_long_its_stages_wait(planned: Planner) -> None:
    config = {**MODEL, "num_hidden_layers": 4}
    line = "RANKS=2 ds.pipeline.stages=2 data.seq_len=16 model.init_from="
    deep = planned.add("deep", config).parent
    made = planned(f"{line}{deep}", estimate=False)
    assert "pipeline_bubble" not in [event["kind"] for event in made.events]
    small = planned(f"{line}{deep}", estimate=False, counts=CHATS)
    assert small.global_batch == 1
    assert "wait 50% of each step" in next(
        event["message"] for event in small.events if event["kind"] == "pipeline_bubble"
    )


RAMP = "ramp.batch_from=8 ramp.batch_tokens=100000"
CARRY = "RANKS=4 train.carry_state=true plan.force=true model.name=$lstm data.seq_len=16"
# Llama-3-8B, with 8,192 tokens on each of two ranks.
LARGE = (
    "RANKS=2 GPU=h100-80 ds.bf16.enabled=true model.name=llama-3-8b data.seq_len=8192 "
    "train.micro_batch=1 train.global_batch=2"
)


def test_batch_ramp_is_counted_in_the_plan(planned: Planner) -> None:
    tokens = f"train.tokens={128 * 8 * 10}"
    assert planned(tokens, estimate=False).steps == 2
    assert planned(f"{tokens} {RAMP}", estimate=False).steps == 10
    growing = planned(f"ramp.length_from=16 ramp.length_tokens={128 * 300}", estimate=False)
    samples = (0, 100, 200, 300)
    assert [growing.curriculum.at(sample).pieces for sample in samples] == [8, 4, 2, 1]


def test_the_budget_is_the_largest_micro_batch_that_is_estimated(planned: Planner) -> None:
    line = "RANKS=2 ds.zero_optimization.stage=1 data.seq_len=128"
    budget = planned(f"{line} data.batching=token_budget data.tokens_per_batch=512")
    plain = planned(f"{line} train.micro_batch=4")
    assert budget.micro_batch == budget.config.train.micro_batch == 4
    assert budget.estimate.needed == plain.estimate.needed


def test_the_estimate_is_that_of_the_chunks(planned: Planner) -> None:
    gib = []
    for words, chunk in (("", 8192), ("model.loss_chunk=8192", 8192), ("model.loss_chunk=0", 0)):
        made = planned(f"{LARGE} model.kernels=none {words}")
        gib.append(made.estimate.worst.phase("loss")["logits and loss"] / 2**30)
        assert made.to_json()["loss_chunk"] == chunk
        assert ("loss in chunks" in summary(made)) is (chunk > 0)
    assert gib[0] == gib[1] == pytest.approx(1.48, abs=0.01)
    assert gib[2] == pytest.approx(11.74, abs=0.01)


def test_the_plan_knows_what_models_carry() -> None:
    assert tuple(WINDOWS) == tuple(CARRIED)


def test_all_that_is_in_the_way_of_carrying_is_named_at_once(planned: Planner) -> None:
    words = beside(__file__, "batches.toml")["carried"]
    ramps = "ramp.batch_tokens=10000 ramp.length_tokens=1000"
    ds: dict[str, Any] = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}
    line = " ".join(f"{key}={value}" for key, value in words.items())
    problems = planned.problems(f"{CARRY} {line} {ramps}", ds)
    carried = [problem for problem in problems if "train.carry_state" in problem]
    named = {*words, "pipeline.stages", "tensor_parallel.autotp_size"}
    assert {problem.split()[0] for problem in carried} == named
