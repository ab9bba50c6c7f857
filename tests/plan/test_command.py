from __future__ import annotations

import json

import pytest

from harness.errors import ConfigError
from harness.plan.command import DEFAULT_DS_JSON, Command, parse_command, plan_from

CPU = {"DS_ACCELERATOR": "cpu"}


def problems_of(*argv, environ=CPU):
    with pytest.raises(ConfigError) as caught:
        plan_from(parse_command(argv), environ)
    return caught.value.problems


def test_no_argument_is_the_default_job():
    assert parse_command([]) == Command()
    assert DEFAULT_DS_JSON.is_file()


def test_options_and_assignments_in_any_order():
    command = parse_command(
        ["train.steps=1", "--local_rank=3", "--dry-run", "optim.lr=1", "--deepspeed", "x.json"]
    )
    assert command.assignments == ("train.steps=1", "optim.lr=1")
    assert (str(command.deepspeed_path), command.dry_run) == ("x.json", True)
    assert command.trust_remote_code is False


@pytest.mark.parametrize("flag", ["--local_rank=3", "--local-rank=3", "--local_rank 3"])
def test_what_launchers_inject_is_taken(flag):
    assert parse_command(flag.split()).local_rank == 3


@pytest.mark.parametrize("argv", [["--nonsense"], ["--dry"], ["--config"]])
def test_an_unknown_option_ends_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command(argv)
    assert caught.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("word", "listed"),
    [
        ("--deepspeed_config x.json", "--deepspeed_config; did you mean --deepspeed?"),
        ("--deepspeed_config=x.json", "--deepspeed_config=x.json; did you mean --deepspeed?"),
        ("--dry_run --qqq", "--dry_run; did you mean --dry-run?, --qqq"),
        ("--steps=10", "--steps=10 (write train.steps=VALUE)"),
        ("--micro-batch=1", "--micro-batch=1 (write train.micro_batch=VALUE)"),
        ("--num_gpus=2", "--num_gpus=2 (the launcher's: write it before harness/train.py)"),
    ],
)
def test_an_unknown_option_comes_with_the_nearest(word, listed, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_command(word.split())
    assert capsys.readouterr().err.endswith(f"error: unrecognized arguments: {listed}\n")


def test_a_wrong_stage_is_one_problem():
    (problem,) = problems_of("ds.zero_optimization.stage=4", "ds.bf16.enabled=true")
    assert problem.startswith("zero_optimization.stage is 4 (command line): it must be one of")


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command(["--help"])
    assert caught.value.code == 0
    assert "deepspeed harness/train.py --deepspeed ds_configs/zero3.json" in capsys.readouterr().out


def test_ds_assignments_edit_the_json():
    made = plan_from(parse_command(["ds.zero_optimization.stage=2", "train.steps=3"]), CPU)
    assert (made.zero_stage, made.steps) == (2, 3)
    assert made.deepspeed_given["zero_optimization"]["stage"] == 2


def test_the_launchers_environment_is_the_world():
    environ = {**CPU, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    made = plan_from(parse_command([]), environ)
    assert (made.world.rank, made.grid.data, made.grad_accum) == (1, 2, 3)


def test_mistakes_of_both_files_and_of_the_command_line_are_one_report(tmp_path):
    (tmp_path / "run.toml").write_text("[optim]\nlr = -1\n[train]\nglobal_batch = 10\n")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimisation": {}, "fp16": {"x": 1}}))
    argv = ["--config", str(tmp_path / "run.toml"), "--deepspeed", str(tmp_path / "ds.json")]
    environ = {**CPU, "RANK": "0", "WORLD_SIZE": "4"}
    problems = problems_of(*argv, "data.lenght=3", "ds.fp16=", "run.toml", environ=environ)
    for what in ("optim.lr is -1", "data.lenght", "'run.toml' is not key=value", "fp16 is ''"):
        assert sum(what in problem for problem in problems) == 1, what
    assert any("zero_optimisation" in problem for problem in problems)
    assert len(problems) == 5


def test_nobody_reads_about_a_number_they_did_not_write():
    """With the batch unreadable, the default of 48 must not be held against 64 ranks."""
    environ = {**CPU, "RANK": "0", "WORLD_SIZE": "64"}
    (problem,) = problems_of("train.global_batch=64.0", environ=environ)
    assert problem.startswith("train.global_batch is 64.0")
    (problem,) = problems_of("ds.train_batch_size=sixty", environ=environ)
    assert problem.startswith("train_batch_size is 'sixty'")


def test_two_unreadable_files_are_both_reported(tmp_path):
    (tmp_path / "ds.json").write_text("{")
    argv = ["--config", str(tmp_path / "none.toml"), "--deepspeed", str(tmp_path / "ds.json")]
    problems = problems_of(*argv, "optim.lr=-1")
    assert len(problems) == 3


def test_an_impossible_environment_is_a_config_error():
    environ = {"RANK": "2", "WORLD_SIZE": "2"}
    assert "rank 2 of 2" in problems_of(environ=environ)[0]


def test_keys_are_listed_on_demand(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_command(["--keys"])
    assert "optim.lr = 0.003" in capsys.readouterr().out
