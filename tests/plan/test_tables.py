"""The tables of a plan's refusals, notes, texts and values.

A row is a command line, as in plans.py, and its message or values; "..." stands for any text. The
title of a table of messages is the beginning of all its rows. Messages are asserted here and
nowhere else.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harness.run.dry_run import dry_run
from tests.plan.plans import Planner

FOLDER = Path(__file__).parent


def rows(*paths: Path) -> list[tuple[str, list[str]]]:
    return [
        (f"{shared} {words}".strip(), [patterns] if isinstance(patterns, str) else patterns)
        for path in sorted(paths)
        for shared, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for words, patterns in table.items()
    ]


def is_like(text: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("..."))), text) is not None


def assert_match(sentences: list[str], patterns: list[str]) -> None:
    """Assert that the sentences match the patterns, in any order."""
    assert len(sentences) == len(patterns), sentences
    for pattern in patterns:
        assert any(is_like(text, pattern) for text in sentences), (pattern, sentences)


@pytest.mark.parametrize(("line", "patterns"), rows(*(FOLDER / "refusals").glob("*.toml")))
def test_setting_is_refused_in_one_report(line: str, patterns: list[str], planned: Planner) -> None:
    problems = planned.problems(line)
    assert_match(problems, patterns)
    assert len("\n".join(problems)) < 2_100


@pytest.mark.parametrize(("line", "patterns"), rows(FOLDER / "notes.toml"))
def test_plan_notes_the_unexpected(line: str, patterns: list[str], planned: Planner) -> None:
    assert_match(planned.notes(line), patterns)


@pytest.mark.usefixtures("cpu_with_bf16")
@pytest.mark.parametrize(("line", "patterns"), rows(FOLDER / "texts.toml"))
def test_dry_run_shows_the_rows_of_a_line(line: str, patterns: list[str], planned: Planner) -> None:
    elsewhere = "model.init_from=$small" in line  # with its tokenizer
    shown = dry_run(planned(line), elsewhere).text().splitlines()
    assert [text for text in patterns if not any(is_like(row, text) for row in shown)] == [], shown


def value_of(value: Any, name: str) -> Any:
    """Return a value by attributes and keys, as TOML; "none" for None and missing keys."""
    for part in name.split("."):
        if value is None or isinstance(value, Mapping):
            value = (value or {}).get(part)
        else:
            value = getattr(value, part)
    if isinstance(value, tuple):
        return [*value]
    return "none" if value is None else value


def assert_value(value: Any, wanted: Any) -> None:
    """Assert that a value is equal or like a text; of a section, those of its values that are
    wanted.
    """
    if isinstance(value, BaseModel):
        for name, inner in wanted.items():
            assert_value(value_of(value, name), inner)
    elif isinstance(value, str):
        assert is_like(value, wanted)
    else:
        assert type(value) is type(wanted)
        assert value == wanted


def values() -> Iterator[Any]:
    tables = tomllib.loads((FOLDER / "values.toml").read_text(encoding="utf-8"))
    for title, table in tables.items():
        names, shared = table.pop("of").split(), table.pop("with", "")
        for words, row in table.items():
            expected = dict(zip(names, row if len(names) > 1 else [row], strict=True))
            yield pytest.param(f"{shared} {words}", expected, id=f"{title}: {words}")


@pytest.mark.usefixtures("cpu_with_bf16")
@pytest.mark.parametrize(("line", "expected"), [*values()])
def test_plan_has_values_of_its_line(line: str, expected: dict[str, Any], planned: Planner) -> None:
    made = planned(line, estimate=False)
    sizes, ds = (made.micro_batch, made.grad_accum), made.deepspeed
    assert (ds["train_micro_batch_size_per_gpu"], ds["gradient_accumulation_steps"]) == sizes
    assert made.global_batch == prod(sizes) * made.grid.data == made.config.train.global_batch
    for name, wanted in expected.items():
        assert_value(value_of(made, name), wanted)
