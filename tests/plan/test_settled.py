"""What a run decides once, and keeps whenever it goes on."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoint.compatibility import resume_problems
from harness.config.assignments import DECIDED, KEPT
from harness.errors import ConfigError
from harness.plan.plan import Counts, Facts, Plan
from tests.plan.plans import Planner
from tests.tables import beside

CHATS = Counts(examples=294, windows=28, is_masked=True)
GROWN = Counts(examples=29_400, windows=2_800, is_masked=True)
TUNED = "data.seq_len=16 model.init_from=$small"
"""A run that starts from given weights."""


def record(plan: Plan, folder: Path) -> dict[str, Any]:
    """Write the plan.json of a run, and return it."""
    folder.mkdir(exist_ok=True)
    written = json.dumps(plan.to_json())
    (folder / "plan.json").write_text(written)
    return dict(json.loads(written))


LINES = st.tuples(
    st.sampled_from(["", "RANKS=3", "RANKS=4 ds.zero_optimization.stage=2", "GPU=h100-80"]),
    st.sampled_from([TUNED, "model.name=llama-1b", "data.seq_len=16 model.name=$small"]),
    st.sampled_from(["", "train.steps=7", "train.tokens=9e6", "train.epochs=2"]),
    st.sampled_from(["", "optim.warmup_steps=3", "optim.lr=0.001", "optim.name=sgd"]),
    st.sampled_from(["", "data.batching=padded", "data.packing=whole", "data.date=2024-07-26"]),
    st.sampled_from(["", "train.global_batch=12", "train.micro_batch=1", "model.lora.rank=4"]),
).map(" ".join)
FACTS = st.builds(
    Facts,
    st.builds(Counts, st.integers(1, 99_999), st.integers(1, 9_999), st.booleans()),
    st.sampled_from([0, 64, 90]),
    st.booleans(),
)


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(line=LINES, first=FACTS, then=FACTS)
def test_a_run_that_goes_on_has_the_plan_that_it_began_with(
    planned: Planner, tmp_path_factory: pytest.TempPathFactory, line: str, first: Facts, then: Facts
) -> None:
    """Though its data has grown. Its tokenizer may not have."""
    folder = tmp_path_factory.mktemp("run")
    try:
        began = planned(f"{line} run.dir={folder}", estimate=False, facts=first)
    except ConfigError:  # keys that exclude each other
        return
    before = record(began, folder)
    then = Facts(then.counts, first.ids, first.has_documents)
    again = planned(f"{line} run.dir={folder}", estimate=False, facts=then)
    after = json.loads(json.dumps(again.to_json()))
    assert resume_problems(before, after, []) == []
    for key in ("run_set", "events", "attention_why"):  # why, not what
        before.pop(key), after.pop(key)
    assert after == before


@pytest.mark.parametrize(("words", "batch", "epochs"), beside(__file__, "settled.toml")["users"])
def test_the_users_word_is_above_what_was_settled(
    words: str, batch: int, epochs: float | None, planned: Planner, tmp_path: Path
) -> None:
    line = f"{TUNED} run.dir={tmp_path}"
    made = planned(line, estimate=False, counts=CHATS)
    record(made, tmp_path)
    again = planned(f"{line} {words}", estimate=False, counts=GROWN).config
    assert (again.train.global_batch, again.train.epochs) == (batch, epochs)
    assert again.optim == made.config.optim
    assert {again.origin(key) for key in ("optim.lr", "data.date")} == {KEPT}


def test_a_branch_keeps_what_its_run_settled(planned: Planner, tmp_path: Path) -> None:
    record(planned(TUNED, estimate=False, counts=CHATS), tmp_path / "run")
    words = f"run.dir={tmp_path / 'b'} resume.from={tmp_path / 'run'}@3 optim.lr=0.5"
    branch = planned(f"{TUNED} {words}", estimate=False, counts=GROWN)
    assert (branch.global_batch, branch.config.train.epochs) == (1, 4)
    assert (branch.config.optim.lr, branch.config.optim.warmup_ratio) == (0.5, 0.03)
    steps = planned(f"{TUNED} {words} optim.warmup_steps=5", estimate=False).config.optim
    assert (steps.warmup_steps, steps.warmup_ratio) == (5, None)


def test_settings_of_the_user_are_not_settled(planned: Planner, tmp_path: Path) -> None:
    """They are compared instead."""
    line = f"{TUNED} run.dir={tmp_path}"
    words = "optim.lr=0.25 data.packing=stream data.bos=off data.date=2024-07-26"
    before = record(planned(f"{line} {words}", estimate=False), tmp_path)
    assert not before["settled"].keys() & {"optim.lr", "data.packing", "data.bos", "data.date"}
    again = planned(line, estimate=False)
    assert again.config.optim.lr == 2.6e-3
    problems = resume_problems(before, again.to_json(), [])
    named = ("data.date", "data.bos", "data.packing", "optim.lr")
    assert [problem.split()[0] for problem in problems] == [*named]


@pytest.mark.parametrize(("first", "then"), [(10, 2), (2, 4)])
def test_ranks_batch_is_kept(first: int, then: int, planned: Planner, tmp_path: Path) -> None:
    made = planned(f"RANKS={first} run.dir={tmp_path}", estimate=False)
    record(made, tmp_path)
    again = planned(f"RANKS={then} run.dir={tmp_path}", estimate=False)
    assert again.global_batch == made.global_batch == (50 if first == 10 else 48)
    (problem,) = planned.problems(f"RANKS=7 run.dir={tmp_path}")
    assert f"{made.global_batch} is not divisible by 7 data ranks" in problem


def test_attention_is_kept_where_it_works(planned: Planner, tmp_path: Path) -> None:
    gpu = f"GPU=h100-80 ds.bf16.enabled=true model.name=llama-1b run.dir={tmp_path}"
    for kept, why in (
        ("eager", "as at the start of the run"),
        ("varlen", "as at the start of the run"),
        ("linformer", "the causal mask needs no tensor"),
        ("flash_attention_9", "the causal mask needs no tensor"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps({"settled": {"model.attention": kept}}))
        made = planned(gpu, estimate=False)
        assert made.attention_why == why
        assert made.config.model.attention == (kept if why.startswith("as at") else "sdpa")
        asked = planned(f"{gpu} model.attention=sdpa", estimate=False)
        assert (asked.config.model.attention, asked.attention_why) == ("sdpa", "")
    (tmp_path / "plan.json").write_text(json.dumps({"settled": {"model.attention": "varlen"}}))
    fp32 = planned(f"GPU=h100-80 model.name=llama-1b run.dir={tmp_path}", estimate=False)
    assert fp32.config.model.attention == "sdpa"


@pytest.mark.parametrize(
    "damaged", ["", "[]", "{}", '{"settled": 7}', '{"settled": {"optim": 7, "a.b": 1}}']
)
def test_a_damaged_record_settles_nothing(damaged: str, planned: Planner, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(damaged)
    config = planned(f"{TUNED} run.dir={tmp_path}", estimate=False).config
    assert config.optim.warmup_ratio == 0.03
    assert config.data.date == datetime.now(UTC).date().isoformat()
    assert KEPT not in config.origins().values()
    assert {*config.origins().values()} & {*DECIDED}
