from __future__ import annotations

import pytest

from harness.config.assignments import (
    assign,
    assign_all,
    did_you_mean,
    flat,
    parse_assignment,
    parse_value,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ("{factor = 2.0}", {"factor": 2.0}),
        ('"3"', "3"),
        ("gpt2-124m", "gpt2-124m"),
        ("/data/corpus=1.jsonl", "/data/corpus=1.jsonl"),
        ("True", "True"),
        ("2024-01-01", "2024-01-01"),
        ("", ""),
        ("3\nother = 4", "3\nother = 4"),
    ],
)
def test_value_is_toml_or_the_word_itself(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_only_the_first_equals_sign_divides():
    assert parse_assignment("data.path=a=b") == ("data.path", "a=b")


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", "train.=3", "--steps"])
def test_what_is_no_assignment_says_so(text):
    with pytest.raises(ValueError, match="is not key=value"):
        parse_assignment(text)


def test_assign_makes_the_tables_on_the_way():
    tree = {"a": {"x": 1}}
    assign(tree, "a.b.c", 2)
    assert tree == {"a": {"x": 1, "b": {"c": 2}}}


def test_assign_does_not_replace_a_value_by_a_table():
    with pytest.raises(ValueError, match=r"a\.x\.y cannot be set: a\.x is 1"):
        assign({"a": {"x": 1}}, "a.x.y", 2)


def test_every_mistake_is_told_and_the_rest_is_assigned():
    tree = {"zero_optimization": {"stage": 1}, "train_batch_size": 4}
    texts = ["zero_optimization.stage=3", "bf16.enabled=auto", "x", "train_batch_size.y=1"]
    keys, problems = assign_all(tree, texts)
    assert keys == ["zero_optimization.stage", "bf16.enabled"]
    assert tree["zero_optimization"] == {"stage": 3}
    assert tree["bf16"] == {"enabled": "auto"}
    assert len(problems) == 2
    assert problems[1] == ("train_batch_size.y cannot be set: train_batch_size is 4 (command line)")


def test_flat():
    assert list(flat({"a": {"b": 1, "c": {}}, "d": [2]})) == [("a.b", 1), ("a.c", {}), ("d", [2])]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optim.ler", "optim.lr"),
        ("lr", "optim.lr"),
        ("model.lr", "optim.lr"),
        ("train.stpes", "train.steps"),
        ("optin.name", "optim.name"),
        ("modle.name", "model.name"),
        ("batch_size", "train.global_batch or train.micro_batch"),
        ("one_of_three_batch", None),
        ("optim.qqq", None),
        ("qqq", None),
    ],
)
def test_nearest_name(word, meant):
    names = ["train.steps", "train.seed", "optim.lr", "optim.name", "optim.eps", "model.name"]
    names += ["train.global_batch", "train.micro_batch"]
    assert did_you_mean(word, names) == (f"; did you mean {meant}?" if meant else "")
