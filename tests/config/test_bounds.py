from __future__ import annotations

import pytest

from harness.config.bounds import MAX_DEPTH, beyond_bounds, parsed_toml
from harness.errors import shortened


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("tree", "beyond"),
    [
        ({"a": nested(5), "b": {"c": 2**63 - 1}}, None),
        ({"a": nested(MAX_DEPTH + 1)}, "a is nested more than 64 deep"),
        ({"a": {"b": nested(100_000)}}, "a.b is nested more than 64 deep"),
        ({"a": [1, -(2**70)]}, "a is an integer of more than 64 bits"),
        ({"a": 16**6000}, "a is an integer of more than 64 bits"),
        ({"a": "\udcff"}, "a has bytes that are not UTF-8"),
        ({"a": {"\udcff": 1}}, "a key in a has bytes that are not UTF-8"),
        ({"a": "x\0"}, "a has a null character"),
    ],
)
def test_what_is_beyond_the_bounds_of_a_config(tree, beyond):
    assert beyond_bounds(tree) == beyond


@pytest.mark.parametrize(
    "text", [".".join("a" * 10**6), "[" + ".".join("a" * 70) + "]", "x = {" + "a ." * 70 + "a = 1}"]
)
def test_a_key_of_too_many_parts_is_not_parsed(text):
    with pytest.raises(ValueError, match="more than 64 parts"):
        parsed_toml(text)


def test_a_text_without_dots_is_looked_through_once():
    assert parsed_toml(f'a = "{"b" * 10**6}"\n[c.d]\ne.f = 1')["c"] == {"d": {"e": {"f": 1}}}


def test_a_long_value_is_shown_without_its_middle():
    assert shortened("abc") == "'abc'"
    assert len(shortened("a" * 10**6)) < 400
