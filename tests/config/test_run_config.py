"""The run config: assignments, bounds, precedence, and error messages."""

import json
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harness.config import assignments
from harness.config.assignments import assign, flat, parse_assignment, parse_value, parsed_toml
from harness.config.run_config import RunConfig, keys_as_text, known_keys
from harness.config.run_file import EXAMPLES, load_run_config
from harness.config.sections import LogConfig, help_texts
from harness.errors import ConfigError, shortened
from harness.files.forms import value_of
from harness.plan.command import parse_command, plan_from
from tests.tables import beside

TABLES = beside(__file__, "run_config.toml")

CPU = {"DS_ACCELERATOR": "cpu"}


def problems_of(path: Path | None, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, words)
    return caught.value.problems


def report_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_from(parse_command(argv), CPU)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


# Assignments.


@pytest.mark.parametrize(("text", "value"), TABLES["values"])
def test_value_is_toml_or_the_word_itself(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)
    assert parse_assignment(f"data.path=a={text}") == ("data.path", f"a={text}")


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", "train.=3", "--steps"])
def test_malformed_assignment_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not key=value"):
        parse_assignment(text)


def test_assign_creates_missing_tables_and_replaces_no_value() -> None:
    tree = {"a": {"x": 1}}
    assign(tree, "a.b.c", 2)
    assert tree == {"a": {"x": 1, "b": {"c": 2}}}
    with pytest.raises(ValueError, match=r"a\.x\.y cannot be set: a\.x is 1"):
        assign(tree, "a.x.y", 2)
    assert list(flat({"a": {"b": 1, "c": {}}, "d": [2]})) == [("a.b", 1), ("a.c", {}), ("d", [2])]


def test_every_mistake_is_told_and_the_rest_is_assigned() -> None:
    tree: dict[str, Any] = {"zero_optimization": {"stage": 1}, "train_batch_size": 4}
    texts = ["zero_optimization.stage=3", "bf16.enabled=auto", "x", "train_batch_size.y=1"]
    assigned, problems = assignments.assign_all(tree, texts)
    assert assigned == {"zero_optimization.stage": 3, "bf16.enabled": "auto"}
    assert tree["zero_optimization"] == {"stage": 3}
    assert tree["bf16"] == {"enabled": "auto"}
    assert len(problems) == 2
    assert problems[1] == "train_batch_size.y cannot be set: train_batch_size is 4 (command line)"


@pytest.mark.parametrize(("word", "meant"), TABLES["suggested"])
def test_unknown_key_suggests_nearest_name(word: str, meant: str | None) -> None:
    names = ["train.steps", "train.seed", "optim.lr", "optim.name", "optim.eps", "model.name"]
    names += ["train.global_batch", "train.micro_batch"]
    assert assignments.did_you_mean(word, names) == (f"; did you mean {meant}?" if meant else "")


# Bounds.


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("tree", "beyond"),
    [
        ({"a": nested(5), "b": {"c": 2**63 - 1}, "d": ["数据", True, 1e300, None]}, False),
        ({"a": nested(assignments.MAX_DEPTH + 1)}, True),
        ({"a": {"b": nested(100_000)}}, True),
        ({"a": [1, -(2**70)]}, True),
        ({"a": 16**6000}, True),
        ({"a": "\udcff"}, True),
        ({"a": {"\udcff": 1}}, True),
        ({"a": "x\0"}, True),
    ],
)
def test_config_values_out_of_bounds_are_rejected(tree: Any, beyond: bool) -> None:
    assert bool(assignments.beyond_bounds(tree)) == beyond


@pytest.mark.parametrize(
    "text", [".".join("a" * 10**6), "[" + ".".join("a" * 70) + "]", "x = {" + "a ." * 70 + "a = 1}"]
)
def test_a_key_of_too_many_parts_is_not_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="more than 64 parts"):
        parsed_toml(text)


def test_long_texts_are_read_and_shown_without_their_middle() -> None:
    assert parsed_toml(f'a = "{"b" * 10**6}"\n[c.d]\ne.f = 1')["c"] == {"d": {"e": {"f": 1}}}
    assert shortened("abc") == "'abc'"
    assert len(shortened("a" * 10**6)) < 400


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.dir=" + "a" * 300, "at most 255 bytes"),
        ('data.path="a\\u0000b"', "data.path: it is nested too deeply, or has"),
        ("run.dir=a\udcff", "invalid text (command line)"),
        ("train.steps=" + "9" * 5000, "train.steps is 99999999999999999999..., which is too large"),
        ("ds.gradient_accumulation_steps=1" + "0" * 30, "an integer of more than 64 bits"),
        (
            "optim.betas=" + "[" * 2000,
            "optim.betas is [[[[[[[[[[[[[[[[[[[[..., which is too large or too",
        ),
        (".".join(["a"] * 3000) + "=1", "a... has 3,000 parts"),
        ("ds." + ".".join(["a"] * 3000) + "=1", "a... has 3,000 parts"),
    ],
)
def test_a_value_that_nobody_means_is_one_short_report(word: str, message: str) -> None:
    report = report_of(word)
    assert message in report
    assert len(report) < 2_100


@pytest.mark.parametrize("option", ["--config", "--deepspeed"])
def test_config_is_regular(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    assert "is not a regular file" in report_of(option, "/dev/zero")
    assert "is not a regular file" in report_of(option, str(tmp_path / "pipe"))
    assert "more than the 4194304" in report_of(option, str(tmp_path / "large"))
    for path in ("~nosuchuser/x", "/" + "x" * 300):
        with pytest.raises(SystemExit, match="2"):
            parse_command([option, path])
        assert f"argument {option}: '{path[:60]}': " in capsys.readouterr().err


@pytest.mark.parametrize("depth", [90, 5_000, 100_000])
def test_a_deep_file_is_refused(tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    (tmp_path / "deep.json").write_text(f'{{"a": {deep}}}')
    (tmp_path / "deep.toml").write_text(f"[optim]\nbetas = {deep}\n")
    (tmp_path / "dots.toml").write_text(".".join(["a"] * depth) + " = 1\n")
    (tmp_path / "config.json").write_text(f'{{"model_type": {deep}}}')
    assert "deep" in report_of("--deepspeed", str(tmp_path / "deep.json"))
    for name in ("deep.toml", "dots.toml"):
        assert "deep" in report_of("--config", str(tmp_path / name))
    assert "deep" in report_of(f"model.name={tmp_path}")


def test_toml_integer_of_thousands_of_digits_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nsteps = " + "9" * 5000)
    (tmp_path / "a.json").write_text('{"train_batch_size": ' + "9" * 5000 + "}")
    assert "cannot be read" in report_of("--config", str(tmp_path / "a.toml"))
    assert "cannot be read" in report_of("--deepspeed", str(tmp_path / "a.json"))


def test_a_model_folder_of_a_run_without_its_model(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json holds no model" in report_of(f"model.name={tmp_path}")


@pytest.mark.parametrize("words", TABLES["large"])
def test_config_of_huge_valid_values_is_planned_quickly(words: list[str]) -> None:
    plan = plan_from(parse_command(words), CPU)
    recorded = json.loads(json.dumps(plan.to_json()))
    assert recorded["run_set"].keys() >= {word.split("=")[0] for word in words}


# The file and the command line.


def test_config_value_records_its_origin(toml: Callable[[str], Path]) -> None:
    path = toml("\ufeff# a comment\ntrain.seed = 0\n[optim]\nlr = 1e-3\nwarmup_steps = 5\n[data]\n")
    run = load_run_config(path, ["optim={lr=5e-4}", "optim={}", "model.overrides.num_heads=2"])
    assert (run.optim.lr, run.optim.warmup_steps, run.optim.weight_decay) == (5e-4, 5, 0.1)
    assert run.origin("optim.lr") == "command line"
    assert run.origin("optim.warmup_steps") == str(path)
    assert run.origin("optim.weight_decay") == "default"
    # Distinguished from a default with the same value.
    keys = {"train.seed", "optim.lr", "optim.warmup_steps", "model.overrides"}
    assert {key for key in known_keys() if run.is_set(key)} == keys
    changed = run.changed({"optim.warmup_steps": 7, "save.async_": True})
    assert (changed.optim.lr, changed.optim.warmup_steps, changed.save.async_) == (5e-4, 7, True)
    assert changed.origins() == run.origins()
    assert changed.is_set("save.async")


def test_command_line_key_displaces_the_files_length(toml: Callable[[str], Path]) -> None:
    run = load_run_config(toml("data.date=2026-01-31\ntrain.tokens=1000\n"), ["train.steps=7"])
    assert (run.train.steps, run.train.tokens) == (7, None)
    assert run.origin("train.tokens") == "default"
    assert load_run_config(None, ["layout.verify=false"]).layout.verify is False
    with pytest.raises(ConfigError, match="train"):
        load_run_config(None, ["train.steps=7", "train=1"])


def test_value_clipping_conflicts_only_with_a_norm_set(toml: Callable[[str], Path]) -> None:
    assert load_run_config(None, ["optim.clip_value=0.5"]).optim.clip_value == 0.5
    (problem,) = problems_of(toml("[optim]\nclip_value = 0.5\nclip_norm = 1.0\n"))
    assert problem.startswith("optim.clip_norm and optim.clip_value exclude each other")


def test_every_mistake_is_in_one_report(toml: Callable[[str], Path]) -> None:
    path = toml("[train]\nsteps = 10\ntokens = 100\n[optim]\nlr = -1\nbeta = 1\n[evals]\nevery=1\n")
    problems = problems_of(path, "data.seq_len=abc", "nonsense", "optim.eps=nan")
    mistakes = ("nonsense", "train.steps and train.tokens", "optim.lr", "optim.beta ", "evals ")
    for part in (*mistakes, "data.seq_len", "optim.eps"):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 7


@pytest.mark.parametrize(("content", "expected"), TABLES["broken"])
def test_broken_file_names_its_line(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "run.toml").write_bytes(content.encode("latin-1"))
    (problem,) = problems_of(tmp_path / "run.toml")
    assert expected in problem
    (problem,) = problems_of(tmp_path)
    assert "cannot be read" in problem


def test_a_tilde_is_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "x").mkdir()
    (tmp_path / "x/text.txt").write_text("a text")
    keys = ("run.dir", "data.path", "data.tokenizer", "data.cache_dir")
    words = [f"{key}=~/x" for key in keys]
    plan = plan_from(parse_command(["--deepspeed=~/ds.json", *words]), CPU)
    assert plan.zero_stage == 2
    assert {plan.config.get(key) for key in keys} == {f"{tmp_path}/x"}
    assert load_run_config(None).run.dir is None


@pytest.mark.parametrize("text", ["optim.lr,data.path", "[optim.lr, data.path]"])
def test_keys_that_may_change_need_no_quotes(text: str) -> None:
    """A shell removes the quotes of a list."""
    run = RunConfig.model_validate({"resume": {"allow": text}})
    assert run.resume.allow == ["optim.lr", "data.path"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("2023", 2023), ("1.0", 1.0), ("true", True), ("True", True), ("2024-01-01", "2024-01-01")],
)
def test_a_value_of_a_record_needs_no_quotes(text: str, value: object) -> None:
    config = load_run_config(None, [f"data.where.column={text}"])
    assert config.data.where["column"] == value_of({"column": value}, "column")
    (problem,) = problems_of(None, "data.where.column=[1]")
    assert "it must be a valid string" in problem


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().optim.lr = 1.0


def test_every_key_is_described_with_its_default() -> None:
    for section in RunConfig.model_fields.values():
        annotation = typing.cast(type[BaseModel], section.annotation)
        assert annotation.__doc__
        assert set(help_texts(annotation)) == set(annotation.model_fields)
    first, *sections = keys_as_text().split("\n\n")
    lines = [line for section in sections for line in section.splitlines()[1:]]
    assert [line.partition(" = ")[0] for line in lines] == known_keys()
    assert [line for line in first.splitlines() if line in lines] == first.splitlines()[1:]
    assert any(line.startswith("train.global_batch = 48 ") for line in lines)
    assert all(line.endswith(".") for line in lines)
    texts = (path.read_text("utf-8") for path in (Path(__file__).parents[2] / "docs").glob("*.md"))
    in_docs = re.findall(r"(\d+) [a-z ]+\s+\(`((?:guard|log)\.\w+)`\)", "".join(texts))
    assert len(in_docs) > 3
    assert [(str(RunConfig().get(key)).removesuffix(".0"), key) for _, key in in_docs] == in_docs


def test_every_list_and_table_has_an_example_that_it_takes(toml: Callable[[str], Path]) -> None:
    """A message about a wrong value shows it."""
    kinds = (list, tuple, dict)
    defaults = ((key, RunConfig().get(key)) for key in known_keys())
    assert {key for key, value in defaults if isinstance(value, kinds)} == {*EXAMPLES}
    for key, text in EXAMPLES.items():
        assert load_run_config(None, [f"{key}={text}"]).is_set(key)
    (problem,) = problems_of(None, "data.eval_path={chat=3}")
    assert problem.endswith("""as in 'data.eval_path={chat="a.jsonl", code="b.jsonl"}'""")
    # In a file, it needs no quotes of a shell.
    (problem,) = problems_of(toml("[data]\nwhere = 3\n"))
    assert problem.endswith('it must be a table, as in data.where={language="de"}')


def test_a_measurement_is_due_at_the_first_line_after_it() -> None:
    log = LogConfig(every=7)
    assert [step for step in range(60) if log.is_due(step, 10)] == [0, 14, 21, 35, 42, 56]
    assert not any(log.is_due(step, 0) for step in range(60))
