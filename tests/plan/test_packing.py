"""The packing of a run that goes on, its date and its begin of text are those of the run before."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.resume import recorded_run, resume_problems
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan


def planned(*words: str) -> Plan:
    return make_plan(load_run_config(None, words), {}, World(0, 1, 0, 1))


def begun(folder: Path, *words: str, earlier: bool = False) -> dict[str, object]:
    """Write the plan.json of a run; of an `earlier` version it has no data.packing."""
    record = planned(*words).to_json()
    for key in ("packing", "too_long", "date", "bos") if earlier else ():
        del record["run"]["data"][key]
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(record))
    return record


@pytest.mark.parametrize("how", ["run.dir", "resume.from"])
def test_a_run_of_an_earlier_version_stays_a_stream(how: str, tmp_path: Path) -> None:
    record = begun(tmp_path / "run", earlier=True)
    plan = planned(f"{how}={tmp_path / 'run'}")
    assert plan.config.data.packing == "stream"
    assert "data.packing is stream" in next(
        e["message"] for e in plan.events if e["kind"] == "kept"
    )
    assert resume_problems(record, plan.to_json(), []) == []
    assert recorded_run(record["run"]).data.packing == "stream"


@pytest.mark.parametrize("packing", ["whole", "stream", None])
def test_a_run_keeps_its_packing(packing: str | None, tmp_path: Path) -> None:
    words = [] if packing is None else [f"data.packing={packing}"]
    record = begun(tmp_path / "run", *words)
    plan = planned(f"run.dir={tmp_path / 'run'}")
    assert plan.config.data.packing == packing
    assert not [event for event in plan.events if event["kind"] == "kept"]
    assert resume_problems(record, plan.to_json(), []) == []


@pytest.mark.parametrize("earlier", [True, False])
def test_another_packing_takes_the_users_word(earlier: bool, tmp_path: Path) -> None:
    words = [] if earlier else ["data.packing=stream"]
    record = begun(tmp_path / "run", *words, earlier=earlier)
    plan = planned(f"run.dir={tmp_path / 'run'}", "data.packing=whole")
    (problem,) = resume_problems(record, plan.to_json(), [])
    assert "data.packing is 'whole', but the run in this folder has 'stream'" in problem
    assert resume_problems(record, plan.to_json(), ["data.packing"]) == []


def test_a_damaged_record_is_no_packing(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[1]", '{"run": 3}', '{"run": {"data": {"packing": 7}}}')):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "plan.json").write_text(text)
        assert planned(f"run.dir={folder}").config.data.packing is None


@pytest.mark.parametrize("how", ["run.dir", "resume.from"])
def test_a_run_keeps_the_date_of_its_first_start(how: str, tmp_path: Path) -> None:
    assert planned().config.data.date == datetime.now(UTC).date().isoformat()
    record = begun(tmp_path / "run", "data.date=2024-07-26")
    plan = planned(f"{how}={tmp_path / 'run'}")
    assert plan.config.data.date == "2024-07-26"
    assert plan.config.origin("data.date") == "default"
    assert resume_problems(record, plan.to_json(), []) == []
    other = planned(f"{how}={tmp_path / 'run'}", "data.date=2024-07-27T09:30")
    (problem,) = resume_problems(record, other.to_json(), [])
    assert "data.date is '2024-07-27T09:30', but the run in this folder has '2024-07-26'" in problem


@pytest.mark.parametrize("text", ["today", "2024-02-30", "5"])
def test_a_date_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.date"):
        planned(f"data.date={text}")


def test_a_record_may_hold_the_default_of_a_key_that_another_excludes(tmp_path: Path) -> None:
    words = ("optim.warmup_ratio=0.03", "optim.clip_value=1.0")
    record = planned(f"run.dir={tmp_path / 'run'}", *words).to_json()
    optim = recorded_run(record["run"]).optim
    assert (optim.warmup_ratio, optim.clip_value) == (0.03, 1.0)
    assert optim.warmup(200) == 6


def test_a_run_of_an_earlier_version_adds_no_begin_to_text(tmp_path: Path) -> None:
    record = begun(tmp_path / "run", earlier=True)
    plan = planned(f"run.dir={tmp_path / 'run'}")
    assert plan.config.data.bos == "off"
    assert plan.config.data.date == datetime.now(UTC).date().isoformat()
    assert recorded_run(record["run"]).data.bos == "off"
    (problem,) = resume_problems(
        record, planned(f"run.dir={tmp_path / 'run'}", "data.bos=auto").to_json(), []
    )
    assert "data.bos is 'auto', but the run in this folder has 'off'" in problem
    assert planned().config.data.bos == "auto"


def test_a_run_of_an_earlier_version_keeps_an_override_without_effect(tmp_path: Path) -> None:
    word = "model.overrides.sliding_window=64"
    record: Any = begun(tmp_path / "run")
    record["run"]["model"]["overrides"] = {"sliding_window": 64}
    record["model_config"]["sliding_window"] = 64
    (tmp_path / "run" / "plan.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="changes nothing: llama models do not read it"):
        planned(word)
    plan = planned(f"run.dir={tmp_path / 'run'}", word)
    assert "the run that goes on has it" in next(
        e["message"] for e in plan.events if e["kind"] == "kept"
    )
    assert resume_problems(record, plan.to_json(), []) == []
