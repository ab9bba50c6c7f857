"""The command line: options, assignments, and both files with their mistakes in one report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.plan.command import DEFAULT_DS_JSON, Command, parse_command, plan_from

CPU = {"DS_ACCELERATOR": "cpu"}


def problems_of(*argv: str, environ: Mapping[str, str] = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_from(parse_command(argv), environ)
    return caught.value.problems


def test_options_and_assignments_in_any_order() -> None:
    assert parse_command([]) == Command()
    assert DEFAULT_DS_JSON.is_file()
    command = parse_command(
        ["train.steps=1", "--local_rank=3", "--dry-run", "optim.lr=1", "--deepspeed", "x.json"]
    )
    assert command.assignments == ("train.steps=1", "optim.lr=1")
    assert (str(command.deepspeed_path), command.dry_run) == ("x.json", True)
    assert command.trust_remote_code is False


@pytest.mark.parametrize("flag", ["--local_rank=3", "--local-rank=3", "--local_rank 3"])
def test_what_launchers_inject_is_taken(flag: str) -> None:
    assert parse_command(flag.split()).local_rank == 3


UNKNOWN = "unrecognized arguments: "


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("--nonsense", 2, f"{UNKNOWN}--nonsense\n"),
        ("--dry", 2, "\n"),
        ("--config", 2, "\n"),
        ("--gpus 4", 2, "add --dry-run"),
        ("--deepspeed_config x.json", 2,
         f"{UNKNOWN}--deepspeed_config; did you mean --deepspeed?\n"),
        ("--deepspeed_config=x.json", 2,
         f"{UNKNOWN}--deepspeed_config=x.json; did you mean --deepspeed?\n"),
        ("--dry_run --qqq", 2, f"{UNKNOWN}--dry_run; did you mean --dry-run?, --qqq\n"),
        ("--steps=10", 2, f"{UNKNOWN}--steps=10 (write train.steps=VALUE)\n"),
        ("--micro-batch=1", 2, f"{UNKNOWN}--micro-batch=1 (write train.micro_batch=VALUE)\n"),
        ("--num_gpus=2", 2,
         f"{UNKNOWN}--num_gpus=2 (the launcher's: write it before harness/train.py)\n"),
        ("--help", 0, "deepspeed harness/train.py --deepspeed ds_configs/zero3.json"),
        ("--keys", 0, "optim.lr = 0.003"),
    ],
)  # fmt: skip
def test_what_ends_with_a_text(
    words: str, code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command(words.split())
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert error in (captured.err if code else captured.out)


def test_ds_assignments_edit_the_json_and_the_launcher_says_the_ranks() -> None:
    environ = {**CPU, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    command = parse_command(["ds.zero_optimization.stage=2", "train.steps=3"])
    made = plan_from(command, environ)
    assert (made.zero_stage, made.steps) == (2, 3)
    assert made.deepspeed_given["zero_optimization"]["stage"] == 2
    assert (made.world.rank, made.grid.data, made.grad_accum) == (1, 2, 3)


def test_mistakes_of_both_files_and_of_the_command_line_are_one_report(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optim]\nlr = -1\n[train]\nglobal_batch = 10\n")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimisation": {}, "fp16": {"x": 1}}))
    argv = ["--config", str(tmp_path / "run.toml"), "--deepspeed", str(tmp_path / "ds.json")]
    environ = {**CPU, "RANK": "0", "WORLD_SIZE": "4"}
    problems = problems_of(*argv, "data.lenght=3", "ds.fp16=", "run.toml", environ=environ)
    mistakes = ("optim.lr is -1", "data.lenght", "'run.toml' is not key=value", "fp16 is ''")
    for part in (*mistakes, "zero_optimisation"):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 5
    (tmp_path / "ds.json").write_text("{")
    argv = ["--config", str(tmp_path / "none.toml"), "--deepspeed", str(tmp_path / "ds.json")]
    assert len(problems_of(*argv, "optim.lr=-1")) == 3


def test_an_impossible_environment_is_a_config_error() -> None:
    assert "rank 2 of 2" in problems_of(environ={"RANK": "2", "WORLD_SIZE": "2"})[0]
