from __future__ import annotations

import typing

import pytest
from pydantic import BaseModel

from harness.config.curriculum import Curriculum
from harness.config.run_config import RunConfig, keys_as_text, known_keys
from harness.config.run_file import load_run_config
from harness.errors import ConfigError


def problems_of(path, *assignments):
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, assignments)
    return caught.value.problems


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_precedence_is_default_then_file_then_command_line(toml):
    path = toml("[optim]\nlr = 1e-3\nwarmup_steps = 5\n")
    run = load_run_config(path, ["optim.lr=5e-4"])
    assert (run.optim.lr, run.optim.warmup_steps, run.optim.weight_decay) == (5e-4, 5, 0.1)


def test_a_value_knows_where_it_came_from(toml):
    path = toml("# a comment\n[optim]\nlr = 1e-3\n\n[data]\nseq_len = 64\ntokenizer = 'a'\n")
    run = load_run_config(path, ["data.seq_len=32", "model.overrides.num_hidden_layers=2"])
    assert run.origin("optim.lr") == str(path)
    assert run.origin("data.tokenizer") == str(path)
    assert run.origin("data.seq_len") == "command line"
    assert run.origin("train.seed") == "default"


def test_what_the_user_set_is_told_from_a_default_of_the_same_value(toml):
    run = load_run_config(toml("train.seed = 0\n[optim]\nlr = 2e-3\n"), ["eval.every=50"])
    set_keys = {key for key in known_keys() if run.is_set(key)}
    assert set_keys == {"train.seed", "optim.lr", "eval.every"}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("optim.lr=nan", "optim.lr is nan (command line): it must be a finite number"),
        ("optim.lr=inf", "optim.lr is inf (command line): it must be a finite number"),
        ("optim.lr=-1", "optim.lr is -1 (command line): it must be greater than 0"),
        ("optim.lr=fast", "optim.lr is 'fast' (command line): it must be a valid number"),
        ("train.steps=1.5", "train.steps is 1.5 (command line): it must be a valid integer"),
        ("train.steps=true", "train.steps is True (command line): it must be a valid integer"),
        (
            "train.steps=-1",
            "train.steps is -1 (command line): it must be greater than or equal to 0",
        ),
        ("train.global_batch=-48", "train.global_batch is -48 (command line): it must be greater"),
        ("save.export=1", "save.export is 1 (command line): it must be a valid boolean, true or"),
        ("optim.betas=[0.9, 1.5]", "optim.betas.1 is 1.5 (command line): it must be less than 1"),
        (
            "optim.betas=0.9",
            "optim.betas is 0.9 (command line): it must be a valid tuple, as in [0.9, 0.95]",
        ),
        ("optim.name=lio", "optim.name is 'lio' (command line): it must be 'adamw', 'adam', 'sgd'"),
        ("model.dropout=nan", "model.dropout is nan (command line): it must be a finite number"),
        ("model.name=", "model.name is '' (command line): String should have at least 1 character"),
        ("model=tiny", "model is 'tiny' (command line): it must be a valid dictionary"),
        ("data.held_out=1.0", "data.held_out is 1.0 (command line): it must be less than 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(assignment, expected):
    (problem,) = problems_of(None, assignment)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("optim.weigth_decay=1", "optim.weight_decay"),
        ("optim.warmup_step=1", "optim.warmup_steps"),
        ("trian=1", "train"),
        ("lr=1", "optim.lr"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_name(unknown, meant):
    (problem,) = problems_of(None, unknown)
    key = unknown.partition("=")[0]
    assert problem == (
        f"{key} (command line) is not a key of the run config; did you mean {meant}?"
    )


def test_every_mistake_is_in_one_report(toml):
    path = toml("[train]\nsteps = 10\ntokens = 100\n[optim]\nlr = -1\nbeta = 1\n[evals]\nevery=1\n")
    problems = problems_of(path, "data.seq_len=abc", "nonsense", "optim.eps=nan")
    mistakes = ("nonsense", "train.steps and train.tokens", "optim.lr", "optim.beta ", "evals ")
    for what in (*mistakes, "data.seq_len", "optim.eps"):
        assert sum(what in problem for problem in problems) == 1, what
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train\nsteps = 1\n", "run.toml:1 is not valid TOML"),
        ("[train]\nsteps = \n", "run.toml:2 is not valid TOML"),
        ("[train]\nsteps = 1\nsteps = 2\n", "run.toml:3 is not valid TOML: Cannot overwrite"),
    ],
)
def test_broken_toml_is_reported_with_file_and_line(toml, text, expected):
    (problem,) = problems_of(toml(text))
    assert expected in problem


def test_a_missing_and_an_unreadable_file(tmp_path):
    (problem,) = problems_of(tmp_path / "none.toml")
    assert "there is no run config" in problem
    (tmp_path / "latin.toml").write_bytes(b"[run]\ndir = '\xe9'\n")
    (problem,) = problems_of(tmp_path / "latin.toml")
    assert "cannot be read" in problem
    (problem,) = problems_of(tmp_path)
    assert "cannot be read" in problem


def test_the_command_line_displaces_the_files_other_length(toml):
    run = load_run_config(toml("[train]\ntokens = 1000\n"), ["train.steps=7"])
    assert (run.train.steps, run.train.tokens) == (7, None)


def test_two_lengths_on_the_command_line_are_a_conflict():
    (problem,) = problems_of(None, "train.steps=7", "train.epochs=1.0")
    assert problem.startswith("train.steps and train.epochs exclude each other")
    assert problem.endswith("(command line)")


def test_clipping_by_value_excludes_only_a_norm_that_the_user_set(toml):
    assert load_run_config(None, ["optim.clip_value=0.5"]).optim.clip_value == 0.5
    (problem,) = problems_of(toml("[optim]\nclip_value = 0.5\nclip_norm = 1.0\n"))
    assert problem.startswith("optim.clip_norm and optim.clip_value exclude each other")


@pytest.mark.parametrize(
    ("assignments", "steps"),
    [
        ([], 100),
        (["train.steps=7"], 7),
        (["train.steps=0"], 0),
        (["train.tokens=1000"], 10),
        (["train.tokens=1001"], 11),
        (["train.epochs=1.5"], None),
    ],
)
def test_length_of_the_run_in_steps(assignments, steps):
    assert load_run_config(None, assignments).train.num_steps(Curriculum(2), 50) == steps


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().optim.lr = 1.0


def test_every_field_says_what_it_is():
    for section in RunConfig.model_fields.values():
        annotation = typing.cast(type[BaseModel], section.annotation)
        assert annotation.__doc__
        for name, field in annotation.model_fields.items():
            assert field.description, name


@pytest.mark.parametrize("text", ["optim.lr,data.path", "[optim.lr, data.path]"])
def test_keys_that_may_change_need_no_quotes(text):
    """A shell takes the quotes of a list away."""
    run = RunConfig.model_validate({"resume": {"allow": text}})
    assert run.resume.allow == ["optim.lr", "data.path"]


def test_every_key_is_described_with_its_default():
    first, *sections = keys_as_text().split("\n\n")
    lines = [line for section in sections for line in section.splitlines()[1:]]
    assert [line.partition(" = ")[0] for line in lines] == known_keys()
    assert [line for line in first.splitlines() if line in lines] == first.splitlines()[1:]
    assert any(line.startswith("train.global_batch = 48 ") for line in lines)
    assert all(line.endswith(".") for line in lines)


def test_run_dir_may_begin_with_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_run_config(None, ["run.dir=~/x"]).run.dir == "/home/me/x"
    assert load_run_config(None).run.dir is None
    with pytest.raises(ConfigError, match=r"run\.dir is '~nobody-here/x'"):
        load_run_config(None, ["run.dir=~nobody-here/x"])


def test_a_key_like_no_other_has_no_hint():
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, ["zzz.rank=8", "optim.zzz=1"])
    assert caught.value.problems == [
        f"{key} (command line) is not a key of the run config" for key in ("optim.zzz", "zzz")
    ]


def test_many_unknown_keys_are_one_line_with_a_count():
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, [f"qqq{n}=1" for n in range(12)])
    (problem,) = caught.value.problems
    assert problem.startswith("12 keys (command line) are none of the run config: qqq0, qqq1, ")
    assert problem.endswith(" and 4 more")


def test_a_key_that_moved_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"write layout\.verify for pipeline\.verify") as raised:
        load_run_config(None, ["pipeline.verify=false"])
    assert len(raised.value.problems) == 1
    assert load_run_config(None, ["layout.verify=false"]).layout.verify is False
