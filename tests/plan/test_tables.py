"""The tables of a plan's refusals and notes.

A row is a command line, as in plans.py, and its message; "..." stands for any text. The title of a
table is the beginning of all its rows. Messages are asserted here and nowhere else.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.plan.plans import Planner

FOLDER = Path(__file__).parent


def rows(*paths: Path) -> list[tuple[str, list[str]]]:
    return [
        (f"{shared} {words}".strip(), [patterns] if isinstance(patterns, str) else patterns)
        for path in sorted(paths)
        for shared, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for words, patterns in table.items()
    ]


def assert_match(sentences: list[str], patterns: list[str]) -> None:
    """Assert that the sentences match the patterns, in any order."""
    assert len(sentences) == len(patterns), sentences
    for pattern in patterns:
        expression = ".*".join(map(re.escape, pattern.split("...")))
        assert any(re.fullmatch(expression, text) for text in sentences), (pattern, sentences)


@pytest.mark.parametrize(("line", "patterns"), rows(*(FOLDER / "refusals").glob("*.toml")))
def test_a_setting_is_refused_in_one_report(
    line: str, patterns: list[str], planned: Planner
) -> None:
    problems = planned.problems(line)
    assert_match(problems, patterns)
    assert len("\n".join(problems)) < 2_100


@pytest.mark.parametrize(("line", "patterns"), rows(FOLDER / "notes.toml"))
def test_a_plan_notes_what_its_user_may_not_expect(
    line: str, patterns: list[str], planned: Planner
) -> None:
    assert_match(planned.notes(line), patterns)
