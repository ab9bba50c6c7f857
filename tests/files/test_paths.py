from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.files.paths import expanded_path, option_path, user_path


def test_a_path_is_expanded_and_a_name_stays(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded_path("~/x") == "/home/me/x"
    assert expanded_path("~") == "/home/me"
    assert [expanded_path(name) for name in ("tiny", "org/model", "a/~b", "runs/x@5")] == [
        "tiny",
        "org/model",
        "a/~b",
        "runs/x@5",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("~nosuchuser/x", "this machine knows no home of ~nosuchuser$"),
        ("~nosuchuser@5", "no home of ~nosuchuser@5"),
        ("a/" + "b" * 256, "255 bytes"),
        ("é" * 128, "255 bytes"),
        ("a/" * 3000, "4,095 bytes"),
        ("a\0b", "NUL character"),
    ],
)
def test_a_path_that_no_file_can_have(text, message):
    with pytest.raises(ValueError, match=message):
        expanded_path(text)


@pytest.mark.parametrize("text", ["\udcff", "a" * 256, "a\0b", "~nosuchuser/x"])
def test_a_path_in_an_option_can_be_one(text, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert option_path("~/x") == Path("/home/me/x")
    with pytest.raises(ArgumentTypeError, match=r"UTF-8|255 bytes|NUL|no home"):
        option_path(text)


def test_a_path_of_a_key_is_expanded_or_refused_by_the_key(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("data.cache_dir", "~/x") == Path("/home/me/x")
    with pytest.raises(ConfigError, match=r"data\.cache_dir is '~nosuchuser/x': this machine"):
        user_path("data.cache_dir", "~nosuchuser/x")
