"""Verdicts on runs, what to do next, and the commands that a page prints."""

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.compatibility import resume_problems
from harness.config.assignments import COUNTED, parse_assignment
from harness.files.paths import REPOSITORY
from harness.plan.command import parse_command, plan_from
from harness.report.page import described, page_of
from harness.report.run_record import read
from harness.report.verdicts import advice, command, ending, verdicts
from tests.report.runs import line_at, plan, write_run
from tests.tables import beside

TABLES = beside(__file__, "verdicts.toml")


@pytest.mark.parametrize(("status", "events", "text", "part"), TABLES["endings"])
def test_every_end_says_how_and_what_to_do(tmp_path, status, events, text, part):
    run = read(write_run(tmp_path / "run", events=events, **status))
    assert text in ending(run).text
    assert any(part in " ".join(item) for item in advice(run))


@pytest.mark.parametrize(
    ("outcome", "attempt", "is_reason"),
    [("failed", 2, True), ("failed", 3, False), ("done", 2, False), ("stopped", 3, False)],
)
def test_memory_verdict_needs_oom_in_the_last_attempt(tmp_path, outcome, attempt, is_reason):
    memory = {"kind": "out_of_memory", "attempt": 2, "message": "rank 1; it helps to X"}
    run = read(write_run(tmp_path / "run", events=[memory], outcome=outcome, attempt=attempt))
    assert ("It ran out of memory. it helps to X" in advice(run)[0].text) == is_reason


@pytest.mark.parametrize(("words", "changes"), TABLES["printed"])
def test_a_printed_command_gives_the_same_plan(tmp_path, words, changes):
    environ = {"DS_ACCELERATOR": "cpu"}
    record = plan_from(parse_command(words), environ).to_json()
    run = read(write_run(tmp_path / "run", the_plan=record))
    command_words = shlex.split(command(run, changes=changes))[2:]
    again = plan_from(parse_command(command_words), environ).to_json()
    assert again["run"]["optim"]["lr"] == changes.get("optim.lr", record["run"]["optim"]["lr"])
    if not changes:
        assert again["deepspeed_given"] == record["deepspeed_given"]
        assert resume_problems(record, again, []) == []


def test_a_line_may_be_newer_than_the_status(tmp_path):
    lines = [line_at(step, gpu_hours=step / 10) for step in (1, 2, 3)]
    old = {"outcome": "running", "step": 1, "gpu_hours": 0.1, "time": "2026-09-01T00:00:00+00:00"}
    run = read(write_run(tmp_path / "run", lines, **old))
    assert (run.step, run.gpu_hours, run.last_sign) == (3, 0.3, lines[-1]["unix_time_s"])


def test_a_command_repeats_lists_and_tables(tmp_path):
    mix = [{"path": "a.txt", "share": 0.5, "name": None}, {"path": "b c.txt"}]
    the_plan = plan()
    the_plan["run"] |= {"eval": {"needle_lengths": [128, 256]}, "data": {"mix": mix}}
    the_plan["run_set"] = {"eval.needle_lengths": "command line", "data.mix": "command line"}
    words = shlex.split(command(read(write_run(tmp_path / "run", the_plan=the_plan))))
    values = dict(map(parse_assignment, words[4:]))
    assert values["eval.needle_lengths"] == [128, 256]
    assert values["data.mix"] == [{"path": "a.txt", "share": 0.5}, {"path": "b c.txt"}]


@pytest.mark.parametrize(("world", "start"), beside(__file__, "commands.toml")["starts"])
def test_a_command_starts_as_the_run_was_started(tmp_path, world, start):
    the_plan = plan()
    the_plan["world"] |= world
    run = read(write_run(tmp_path / "run", the_plan=the_plan))
    assert command(run).startswith(f"{start} --deepspeed ds_configs/zero1.json ")
    assert ("8 ranks on 1 x " in described(run)) == ("ranks_per_gpu" in world)


def test_a_command_begins_in_the_folder_of_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = plan() | {"started_in": str(tmp_path)}
    path = write_run(Path("runs/first"), the_plan=started, outcome="stopped", code=75)
    assert command(read(path)).startswith(f"deepspeed {REPOSITORY}/harness/train.py --deepspeed ")
    monkeypatch.chdir(REPOSITORY)
    again = advice(read(tmp_path / path))[0].command
    assert again.startswith(f"cd {tmp_path} && deepspeed {REPOSITORY}/harness/train.py --deepspeed")
    assert f" run.dir={tmp_path}/runs/first" in again


def late(key: str, first: float, last: float, share: int = 20) -> dict[int, dict[str, float]]:
    """Return changes of all steps: a value that differs in the last ones."""
    return {step: {key: last if step > 200 - share else first} for step in range(1, 201)}


def evaluated(*losses: float) -> dict[int, dict[str, float]]:
    return {50 * n: {"eval_loss": loss} for n, loss in enumerate(losses, 1)}


def memory(*measured: int) -> dict[str, Any]:
    rows = [{"point": "peak", "predicted": 100 << 30, "measured": size << 30} for size in measured]
    return {"kind": "memory", "rows": rows}


@pytest.mark.parametrize("case", TABLES["verdicts"])
def test_verdicts_follow_their_thresholds(tmp_path, case):
    changes = late(*case["late"]) if "late" in case else evaluated(*case.get("losses", ()))
    lines = [line_at(step) | changes.get(step, {}) for step in range(1, 201)]
    events = [case["event"]] if "event" in case else []
    if "peaks" in case:
        events = [memory(*case["peaks"])]
        built = memory(case.get("built", 100))["rows"]
        events[0]["rows"] += [row | {"point": "built"} for row in built]
    judged = verdicts(read(write_run(tmp_path / "run", lines, events)))
    assert [v.kind for v in judged if v.text.startswith(case["text"])] == [case["kind"]]


def test_the_memory_of_a_small_model_has_no_verdict(tmp_path):
    for size, count in ((2**30, 1), (2**30 - 1, 0)):
        event = {"kind": "memory", "rows": [{"point": "peak", "predicted": 9, "measured": size}]}
        judged = verdicts(read(write_run(tmp_path / str(size), events=[event])))
        assert sum(v.text.startswith("Memory") for v in judged) == count


@pytest.mark.parametrize(("losses", "part"), TABLES["evaluations"])
def test_advice_follows_the_last_evaluations(tmp_path, losses, part):
    changes = evaluated(*losses)
    lines = [line_at(step) | changes.get(step, {}) for step in range(1, 201)]
    texts = [" ".join(item) for item in advice(read(write_run(tmp_path / "run", lines)))[1:]]
    assert len(texts) == (part is not None)
    assert all(part in text for text in texts)


def test_running_run_shows_the_time_left(tmp_path):
    status = {
        "outcome": "running",
        "code": None,
        "step": 100,
        "time": datetime.now(UTC).isoformat(),
    }
    lines = [line_at(step, step_time_s=0.5 + (step < 51)) for step in range(1, 101)]
    run = read(write_run(tmp_path / "run", lines, **status))
    assert ending(run).text.startswith("Running: step 100 of 200, 50 s left")


def test_speed_is_that_of_evenly_chosen_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.report.lines.WHOLE_BYTES", 0)
    monkeypatch.setattr("harness.report.lines.RANGES", 20)
    lines = [line_at(step, step_time_s=2.0 if step % 50 == 7 else 0.5) for step in range(1, 1001)]
    texts = [v.text for v in verdicts(read(write_run(tmp_path / "run", lines)))]
    assert "Speed is steady: a step takes 500 ms." in texts


def test_steps_on_a_shared_gpu_have_no_verdict(tmp_path):
    for ranks, count in ((1, 1), (2, 0)):
        record = plan()
        record["world"] |= {"ranks_per_gpu": ranks}
        lines = [line_at(step, step_time_s=0.5) for step in range(1, 101)]
        judged = verdicts(read(write_run(tmp_path / str(ranks), lines, the_plan=record)))
        assert sum(v.text.startswith("Speed") for v in judged) == count


def learning(first: float, last: float) -> list[dict[str, Any]]:
    """Return the lines of a run that is evaluated before its first step and after its last."""
    lines = [line_at(step) for step in range(201)]
    del lines[0]["loss"]
    lines[0]["eval_loss"], lines[-1]["eval_loss"] = first, last
    return lines


@pytest.mark.parametrize(
    ("first", "last", "steps", "events", "verdict", "what", "changed"), TABLES["too_little"]
)
def test_too_little_learning_is_told(first, last, steps, events, verdict, what, changed, tmp_path):
    record = plan() | {"total_steps": steps}
    run = read(write_run(tmp_path / "run", learning(first, last), events, record))
    assert any(verdict in v.text for v in verdicts(run) if v.kind == "warning")
    (todo,) = advice(run)
    assert what in todo.text
    assert "not worth trying yet" in todo.text
    assert {changed, f"run.dir={run.path}-2"} <= {*shlex.split(todo.command)}
    assert "Try the model" not in page_of(run)


def test_a_model_that_learned_is_to_be_tried(tmp_path):
    events = [{"kind": "baselines", "unigram_nats": 5.5, "bigram_nats": 4.0}]
    run = read(write_run(tmp_path / "run", learning(6.2, 3.0), events))
    assert advice(run)[0].command == f"python tools/export_hf.py {tmp_path / 'run'}"
    assert {v.kind for v in verdicts(run)} == {"good"}


def test_a_run_that_was_too_short_says_so_once(tmp_path):
    events = TABLES["short"]
    run = read(write_run(tmp_path / "run", events=2 * events))
    (warning,) = (v.text for v in verdicts(run) if v.kind == "warning")
    assert warning == "The run takes only 2 steps; the run ends during its warm-up."


def test_a_command_has_what_its_user_set_and_one_length(tmp_path):
    record = plan()
    record["run"]["train"] |= {"epochs": 3.0, "global_batch": 4}
    record["run_set"] |= {"train.epochs": "command line", "train.global_batch": COUNTED}
    run = read(write_run(tmp_path / "run", the_plan=record))
    assert "train.epochs=3" in command(run)
    assert "train.global_batch" not in command(run)
    longer = command(run, changes={"train.steps": 400})
    assert "train.steps=400" in longer
    assert "train.epochs" not in longer
