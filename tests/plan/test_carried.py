"""train.carry_state in a plan: what is in its way is named, all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.carried import CARRIED
from harness.layout.world import World
from harness.models.carried import WINDOWS
from harness.plan.make import make_plan
from harness.plan.plan import Plan

CARRY = "train.carry_state=true"


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lstm")
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "recurrent", **sizes}))
    return f"model.name={folder}"


def planned(*words: str, **ds: object) -> Plan:
    run = load_run_config(None, [CARRY, "plan.force=true", *words])
    return make_plan(run, {"zero_optimization": {"stage": 1}, **ds}, World(0, 4, 0, 4))


def problems(*words: str, **ds: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        planned(*words, **ds)
    return [problem for problem in error.value.problems if "train.carry_state (" in problem]


def test_a_recurrent_model_carries_its_state(lstm: str) -> None:
    assert planned(lstm).config.train.carry_state


def test_the_plan_knows_what_models_carry() -> None:
    assert tuple(WINDOWS) == tuple(CARRIED)


def test_other_models_have_none_to_carry() -> None:
    with pytest.raises(ConfigError) as error:
        planned()
    assert error.value.problems == [
        "train.carry_state is True (command line), but tiny is a llama model, which carries no "
        "state: use one of recurrent, mamba2, or leave it out"
    ]


def test_all_that_is_in_the_way_is_named_at_once(lstm: str) -> None:
    words = {
        "model.compile": "model.compile=true",
        "model.stochastic_depth": "model.stochastic_depth=0.1",
        "model.lora.rank": "model.lora.rank=4",
        "data.mix": 'data.mix=[{path="a"}, {path="b"}]',
        "data.batching": "data.batching=padded",
        "data.document_mask": "data.document_mask=true",
        "ramp.batch_from": "ramp.batch_from=8",
        "ramp.length_from": "ramp.length_from=32",
    }
    ramps = ("ramp.batch_tokens=10000", "ramp.length_tokens=1000")
    ds = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}
    seen = problems(lstm, *words.values(), *ramps, **ds)
    named = {*words, "pipeline.stages", "tensor_parallel.autotp_size"}
    assert {problem.split()[0] for problem in seen} == named


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.packing=whole", "data.packing is 'whole' (command line), but windows follow each"),
        ("data.rehearse=old.txt", "data.rehearse_share is 0.1 (default), but each row reads one"),
        (
            "sequence_parallel_size",
            "sequence_parallel_size is 2 (DeepSpeed JSON), but states",
        ),
    ],
)
def test_each_is_worded(word: str, expected: str, lstm: str) -> None:
    ds = {} if "=" in word else {word: 2}
    (problem,) = problems(lstm, *([word] if "=" in word else []), **ds)
    assert problem.startswith(expected)


def test_old_data_may_be_measured(lstm: str, tmp_path: Path) -> None:
    plan = planned(lstm, f"data.rehearse={tmp_path}", "data.rehearse_share=0")
    assert plan.config.train.carry_state
    assert plan.config.data.rehearse == str(tmp_path)
