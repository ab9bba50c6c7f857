"""Configs of other programs are recognized, and so are our two files if swapped."""

import re
from pathlib import Path
from typing import Any

import pytest

from harness.config.ds_json import foreign_config, read_ds_json
from harness.config.run_config import known_keys
from harness.config.run_file import load_run_config, other_names
from harness.errors import ConfigError
from tests.tables import beside

TABLES = beside(__file__, "foreign.toml")


def problem_of(path: Path, wanted: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_ds_json(path) if wanted == "deepspeed" else load_run_config(path)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("wanted", ["deepspeed", "run"])
@pytest.mark.parametrize("program", TABLES["programs"])
def test_foreign_config_is_one_line(tmp_path: Path, wanted: str, program: dict[str, Any]) -> None:
    path = tmp_path / "config.yml"
    path.write_text(program["text"])
    problem = problem_of(path, wanted)
    assert problem.startswith(f"{path} is {program['name']}")
    for place in program["places"]:
        assert place in problem
    assert "as keys of the run config" in problem


@pytest.mark.parametrize(("text", "wanted", "expected"), TABLES["swapped"])
def test_configs_are_told_apart(text: str, wanted: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    assert expected in problem_of(tmp_path / "config", wanted)


def test_a_few_keys_of_somebodys_own_are_no_other_program(tmp_path: Path) -> None:
    keys = ["zero_optimization", "fp16", "train_batch_size", "output_dir", "learning_rate"]
    assert foreign_config("x", keys, "deepspeed") is None
    (tmp_path / "ds.json").write_text('{\n  "bf16": {"enabled": true},\n  "fp16": }')
    assert "ds.json:3:11 is not valid JSON" in problem_of(tmp_path / "ds.json", "deepspeed")


def test_what_other_trainers_call_a_key_is_one_of_ours() -> None:
    ours = {*known_keys(), "ds.bf16.enabled", "ds.fp16.enabled", "ds.zero_optimization.stage"}
    suggested = [text for text in other_names().values() if not text.startswith(":")]
    words = {word for text in suggested for word in re.findall(r"[a-z]+\.[a-z0-9_.]+", text)}
    assert words - {"zero3.json"} <= ours


@pytest.mark.parametrize(("key", "said"), TABLES["other_trainers"])
def test_keys_of_other_trainers_are_answered(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_run_config(None, [f"{key}=true"])
