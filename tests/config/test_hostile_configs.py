"""Values that nobody means: one report before a device is touched, in bounded time and memory."""

from __future__ import annotations

import json
import os

import pytest

from harness.errors import ConfigError
from harness.plan.command import parse_command, plan_from

CPU = {"DS_ACCELERATOR": "cpu"}


def problem_of(*argv):
    with pytest.raises(ConfigError) as caught:
        plan_from(parse_command(argv), CPU)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        # Paths.
        ("run.dir=~nosuchuser/x", "run.dir is '~nosuchuser/x' (command line): this machine knows"),
        ("data.path=~nosuchuser/x", "data.path is '~nosuchuser/x' (command line): this machine"),
        ("data.tokenizer=~nosuchuser/x", "data.tokenizer is"),
        ("data.cache_dir=~nosuchuser/x", "data.cache_dir is"),
        ("model.name=~nosuchuser/x", "model.name is"),
        ("model.init_from=~nosuchuser/x", "model.init_from is"),
        ("resume.from=~nosuchuser/x@5", "resume.from is"),
        ("run.dir=" + "a" * 300, "255 bytes at most"),
        ("data.path=" + "a/" * 3000, "4,095 bytes at most"),
        ("model.name=" + "m" * 300, "255 bytes at most"),
        ('data.path="a\\u0000b"', "data.path has a null character (command line)"),
        ("run.dir=a\udcff", "run.dir has bytes that are not UTF-8 (command line)"),
        ("run.dir=/dev/null", "run.dir is '/dev/null' (command line), but it is not a folder"),
        ("run.dir=/dev/null/x", "but /dev/null is not a folder"),
        # Numbers.
        ("train.steps=" + "9" * 5000, "train.steps is 99999999999999999999..., too large"),
        ("train.steps=0x" + "f" * 5000, "train.steps is an integer of more than 64 bits"),
        ("train.steps=9007199254740993", "less than or equal to 9007199254740992"),
        ("train.global_batch=4294967296", "less than or equal to 2147483647"),
        ("guard.spike_window=9223372036854775807", "less than or equal to 1000000"),
        ("data.prefetch=99999999", "less than or equal to 1024"),
        ("optim.cycles=1000000000", "less than or equal to 10000"),
        ("ds.gradient_accumulation_steps=1" + "0" * 30, "an integer of more than 64 bits"),
        ("ds.gradient_accumulation_steps=1" + "0" * 17, "does not divide the 48 samples"),
        ("ds.train_micro_batch_size_per_gpu=1" + "0" * 17, "less than or equal to 2147483647"),
        # Depth.
        ("optim.betas=" + "[" * 2000, "optim.betas is [[[[[[[[[[[[[[[[[[[[..., too large or too"),
        ("optim.betas=" + "[" * 90 + "]" * 90, "optim.betas is nested more than 64 deep"),
        (".".join(["a"] * 3000) + "=1", "a... has 3,000 parts"),
        ("ds." + ".".join(["a"] * 3000) + "=1", "a... has 3,000 parts"),
        # A model's values.
        ("model.overrides.attention_dropout=2", "is 2: it must be a probability, from 0 to 1"),
        ("model.overrides.rope_theta=x", "model.overrides.rope_theta (command line) is 'x': it"),
        ("model.overrides.layer_types=3", "layer_types (command line) is 3: it must be a list"),
        ("model.overrides.pad_token_id=99999999", "less than vocab_size, which is 8192"),
        ("model.overrides.rope_scaling=3", "is 3: it must be a table"),
        ("model.overrides.num_hidden_layers=100000000", "it must be at most 2,000"),
        ("model.overrides.num_local_experts=100000000", "it must be at most 100,000"),
        # Files.
        ("model.name=/dev/zero", "/dev/zero is a device, not a file"),
    ],
)
def test_a_value_that_cannot_be_is_one_report(word, message):
    report = problem_of(word)
    assert message in report
    assert len(report) < 2_100


@pytest.mark.parametrize("option", ["--config", "--deepspeed"])
def test_a_config_is_a_small_regular_file(tmp_path, option):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    assert "is a device, not a file" in problem_of(option, "/dev/zero")
    assert "is a pipe, not a file" in problem_of(option, str(tmp_path / "pipe"))
    assert "more than the 4194304" in problem_of(option, str(tmp_path / "large"))


@pytest.mark.parametrize("option", ["--config", "--deepspeed"])
@pytest.mark.parametrize("path", ["~nosuchuser/x", "/" + "x" * 300])
def test_an_option_with_a_path_that_cannot_be_ends_with_code_2(option, path, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_command([option, path])
    assert f"argument {option}: '{path[:60]}': " in capsys.readouterr().err


@pytest.mark.parametrize("depth", [90, 5_000, 100_000])
def test_a_deep_file_is_refused(tmp_path, depth):
    (tmp_path / "deep.json").write_text(f'{{"a": {"[" * depth}{"]" * depth}}}')
    (tmp_path / "deep.toml").write_text(f"[optim]\nbetas = {'[' * depth}{']' * depth}\n")
    (tmp_path / "dots.toml").write_text(".".join(["a"] * depth) + " = 1\n")
    assert "deep" in problem_of("--deepspeed", str(tmp_path / "deep.json"))
    for name in ("deep.toml", "dots.toml"):
        assert "deep" in problem_of("--config", str(tmp_path / name))
    (tmp_path / "config.json").write_text(f'{{"model_type": {"[" * depth}{"]" * depth}}}')
    assert "deep" in problem_of(f"model.name={tmp_path}")


def test_thousands_of_digits_in_a_file(tmp_path):
    (tmp_path / "a.toml").write_text("[train]\nsteps = " + "9" * 5000)
    (tmp_path / "a.json").write_text('{"train_batch_size": ' + "9" * 5000 + "}")
    assert "cannot be read" in problem_of("--config", str(tmp_path / "a.toml"))
    assert "cannot be read" in problem_of("--deepspeed", str(tmp_path / "a.json"))


def test_a_model_folder_of_a_run_without_its_model(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json holds no model" in problem_of(f"model.name={tmp_path}")


@pytest.mark.parametrize(
    "words",
    [
        ["train.global_batch=1000000000"],
        ["train.global_batch=2147483647"],
        ["train.steps=9007199254740992"],
        ["train.tokens=9007199254740992"],
        ["eval.samples=9007199254740992"],
        ["model.overrides.vocab_size=9000000000000000000"],
        ["train.seed=9223372036854775807"],
        ["optim.schedule=cosine_restarts", "optim.cycles=10000"],
    ],
)
def test_what_is_large_but_possible_is_planned_in_no_time(words):
    plan = plan_from(parse_command(words), CPU)
    recorded = json.loads(json.dumps(plan.to_json()))
    assert recorded["run_set"].keys() >= {word.split("=")[0] for word in words}


def test_a_ramp_of_too_many_rises_is_refused():
    words = ("train.global_batch=2000000000", "ramp.batch_from=1", "ramp.batch_tokens=1000000")
    assert "rises 1,999,999,999 times: set ramp.batch_step to 200000 or more" in problem_of(*words)


def test_a_tilde_is_expanded_in_every_path_key(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    keys = ("run.dir", "data.path", "data.tokenizer", "data.cache_dir")
    words = [f"{key}=~/x" for key in keys]
    plan = plan_from(parse_command(["--deepspeed=~/ds.json", *words]), CPU)
    assert plan.zero_stage == 2
    assert {plan.config.get(key) for key in keys} == {f"{tmp_path}/x"}
