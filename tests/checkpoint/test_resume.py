"""Changes that a resumed run may make."""

import re
from typing import Any

import pytest

from harness.checkpoint.compatibility import asked, branch_problems, resume_problems
from harness.config.run_config import RunConfig
from harness.plan.model_config import presets
from tests.tables import beside

CHANGES = beside(__file__, "resume.toml")


def record(**sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": RunConfig.model_validate(sections).model_dump(mode="json"),
        "precision": "bf16",
        "model_config": {**presets()["tiny"]["config"], "rope_theta": 3},
        "data_fingerprint": "abc",
    }


@pytest.mark.parametrize("change", CHANGES["accepted"])
def test_resume_accepts_changed_length_and_reporting(change: dict[str, Any]) -> None:
    assert resume_problems(record(), record(**change), []) == []


@pytest.mark.parametrize(("change", "key"), CHANGES["rejected"])
def test_resume_rejects_changed_keys_unless_allowed(change: dict[str, Any], key: str) -> None:
    (problem,) = resume_problems(record(), record(**change), [])
    assert problem.startswith(f"{key} is ")
    assert f"resume.allow={key}" in problem
    assert resume_problems(record(), record(**change), [key]) == []
    assert len(resume_problems(record(**change), record(), [])) == 1


def test_pairs_of_a_folder_that_have_changed_are_named() -> None:
    def planned(*pairs: tuple[str, int, int]) -> dict[str, Any]:
        of_sources = {"": [[*pair] for pair in pairs]}
        return {**record(), "data_fingerprint": str(pairs), "data": {"pairs": of_sources}}

    before = planned(("a.bin", 3, 9), ("b.bin", 4, 8), ("c.bin", 1, 2))
    after = planned(("a.bin", 3, 9), ("c.bin", 1, 5), ("d.bin", 1, 2))
    (problem,) = resume_problems(before, after, [])
    assert "; b.bin removed; d.bin new; c.bin resized: restore" in problem


@pytest.mark.parametrize("key", ["precision", "model_config", "data_fingerprint"])
def test_precision_model_and_data_may_not_change(key: str) -> None:
    for problems in (resume_problems, branch_problems):
        (problem,) = problems(record(), {**record(), key: "other"}, [])
        assert problem.startswith(f"{key} is 'other'")


@pytest.mark.parametrize(("sections", "problems"), CHANGES["branches"])
def test_branch_keeps_length_and_optimizer(sections: dict[str, Any], problems: list[str]) -> None:
    found = branch_problems(record(), record(**sections), [])
    assert [problem.partition(",")[0] for problem in found] == problems
    assert branch_problems(record(), record(**sections), ["data.seq_len", "optim.name"]) == []


def test_resume_error_shows_the_difference_of_two_tables() -> None:
    planned = record()
    planned["model_config"] |= {f"same_{number}": number for number in range(20)}
    saved = {**planned, "model_config": {**planned["model_config"], "rope_theta": 2, "more": 1}}
    (problem,) = resume_problems(saved, planned, [])
    assert problem.startswith(
        "model_config is {'rope_theta': 3}, but the run in this folder has {'rope_theta': 2, "
        "'more': 1}: "
    )


def test_states_in_bf16_are_another_precision() -> None:
    halves = {"deepspeed": {"bf16": {"bf16_optimizer_states": True}}}
    for saved, planned in ((record(), {**record(), **halves}), ({**record(), **halves}, record())):
        (problem,) = resume_problems(saved, planned, [])
        assert "bf16 states" in problem
        assert resume_problems(saved, planned, ["precision"]) == []


def test_resume_error_lists_every_difference() -> None:
    problems = resume_problems(record(), record(optim={"lr": 0.5, "momentum": 0.5}), ["x"])
    assert len(problems) == 2
    assert all("set resume.allow=x,optim.lr,optim.momentum to" in problem for problem in problems)


def test_all_that_a_run_will_ask_for_is_named_at_once() -> None:
    keys = ["data.path", "data.mix", "model.lora"]
    more = ["data_fingerprint", "data_mixture"]
    assert [*asked(keys, {})] == [*keys, "probe", *more]
    assert [*asked(["data.seq_len"], {})] == ["data.seq_len"]
    assert [*asked(keys, dict.fromkeys(more))] == [*keys, "probe"]  # the run has read its data


@pytest.mark.parametrize(("sizes", "lora", "start"), CHANGES["shapes"])
def test_no_key_allows_new_shapes(sizes: dict[str, Any], lora: dict[str, Any], start: str) -> None:
    planned = record(model={"lora": lora})
    planned["model_config"] |= sizes
    for problems in (resume_problems, branch_problems):
        (problem,) = problems(record(), planned, ["model_config", "model.lora"], "/run")
        assert re.search(start, problem), problem
        assert "resume.allow" not in problem
