from __future__ import annotations

import pytest

from harness.config.ds_file import load_ds_json, read_ds_json
from harness.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "ds.json"
        path.write_text(text)
        return path

    return write


def problems_of(path):
    with pytest.raises(ConfigError) as caught:
        read_ds_json(path)
    return caught.value.problems


def test_reads_what_is_there(write):
    path = write('{"a": [1, {"b": 2e3}], "c": {"d": null}}')
    assert read_ds_json(path) == {"a": [1, {"b": 2000.0}], "c": {"d": None}}
    assert type(read_ds_json(path)["c"]) is dict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": }', "ds.json:1:7 is not valid JSON: Expecting value"),
        ('{\n "a": 1\n "b": 2}', "ds.json:3:2 is not valid JSON: Expecting ',' delimiter"),
        ("", "ds.json:1:1 is not valid JSON"),
        ("[1]", "holds [1], not an object"),
        ('{"a": NaN}', "NaN is not a number that JSON has"),
        ('{"a": -Infinity}', "-Infinity is not a number that JSON has"),
    ],
)
def test_what_is_no_json_object_is_reported_with_its_place(write, text, expected):
    (problem,) = problems_of(write(text))
    assert expected in problem


def test_a_missing_and_an_unreadable_file(tmp_path):
    assert "there is no DeepSpeed JSON" in problems_of(tmp_path / "none.json")[0]
    assert "cannot be read" in problems_of(tmp_path)[0]


def test_duplicate_keys_at_every_level_are_all_named(write):
    path = write('{"fp16": {"enabled": true, "enabled": false}, "a": 1, "a": 2, "fp16": {}}')
    assert problems_of(path) == [
        f"{path} has {key} 2 times in one object: keep one of them"
        for key in ("enabled", "fp16", "a")
    ]


def test_assignments_take_the_place_of_the_files_values_under_any_name(write):
    path = write('{"bfloat16": {"enabled": false}, "train_batch_size": 8}')
    ds, problems = load_ds_json(path, ["bf16.enabled=true", "a"])
    assert problems == ["ds.'a' is not key=value, as in train.steps=100 (command line)"]
    assert ds.tree == {"bf16": {"enabled": True}, "train_batch_size": 8}
    assert ds.origin("train_batch_size") == str(path)
    assert ds.origin("bf16.enabled") == "command line"
