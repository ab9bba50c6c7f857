"""The course: exercises that tell mistakes apart, commands that answer them, and its page."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from harness.errors import ConfigError
from tests.real_runs import REPOSITORY, environment
from tests.tables import beside
from tests.test_readme import commands_of, program_of
from tests.tiers import rest_in_gate
from tools.exercise import main
from tools.exercises.posing import AFTERNOONS, EXERCISES, posed, read_answer
from tools.studio_app.page import LESSONS, not_shown

NAMES = ("anna", "bob", "carla")
PAGE = (REPOSITORY / "docs/course.md").read_text()
TABLES = beside(__file__, "exercise.toml")


@pytest.mark.parametrize("number", EXERCISES)
def test_an_exercise_tells_mistakes_apart(number: str) -> None:
    tasks = [posed(EXERCISES[number], name) for name in NAMES]
    assert len({task.text() for task in tasks}) == len(NAMES)
    for task in tasks:
        assert max(map(len, task.text().splitlines())) <= 80
        assert task.judge(task.shown(task.truth)) == []
        assert task.judge(f"{task.truth * 1.2 if task.within else task.truth + 2}") != []
        assert "too high" in task.judge("1e30")[0]
        assert task.wrong
        for value, why in task.wrong:
            assert why in task.judge(task.shown(value))
        for address in task.pages:
            slug, _, query = address.partition("?")
            controls = import_module(f"tools.studio_pages.{slug}").PAGE.controls
            assert not_shown(controls, dict(parse_qsl(query))) == []


def test_numbers_are_the_same_on_every_machine() -> None:
    assert posed(EXERCISES["3.2"], "ANNA").task.startswith("64 ranks are divided into 4 pipeline")


@pytest.mark.parametrize(
    ("number", "patterns", "formula"), rest_in_gate("tools", map(tuple, TABLES["commands"]), keep=5)
)
def test_the_commands_of_an_exercise_answer_it(
    number: str, patterns: list[str], formula: str, tmp_path: Path
) -> None:
    task, shown = posed(EXERCISES[number], "dora"), list[str]()
    (tmp_path / "my.toml").write_text(task.file)
    for command in task.commands:
        _, program, *words = shlex.split(command)
        ran = [sys.executable, REPOSITORY / program, *words]
        done = subprocess.run(ran, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        shown.append(done.stdout)
    numbers = []
    for pattern, text in zip(patterns, [*shown, task.task], strict=False):
        found = re.search(pattern, text, re.MULTILINE)
        assert found, text
        numbers += [float(number.replace(",", "")) for number in found.groups()]
    answer = eval(formula, {}, dict(zip("abc", numbers, strict=False)))
    assert task.judge(f"{answer:.6g} {task.unit}") == []


@pytest.mark.parametrize(("typed", "unit", "meant"), TABLES["answers"])
def test_an_answer_is_read_as_people_write_it(typed: str, unit: str, meant: list[float]) -> None:
    assert {*read_answer(typed, unit)} == {*meant}


@pytest.mark.parametrize("typed", TABLES["refused"])
def test_text_that_is_no_answer_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"\A.*is no (?:answer|unit).*\Z"):
        read_answer(typed, "GiB")


def test_solved_exercises_are_kept_until_forgotten(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STUDENT", "Anna")

    def said(*words: str, code: int = 0) -> str:
        assert main([*words]) == code
        return capsys.readouterr().out

    assert "with the numbers of Anna" in said("3.1")
    assert "anna, not right: with one micro-batch less" in said(
        "3.1", "30", "--name", "anna", code=1
    )
    assert "0 of 20 solved by Anna" in said()
    assert "right: 31 micro-batches. So" in said("3.1", "31", "micro-batches")
    assert "1 of 20 solved by Anna" in said("--name", "bob", "--forget") + said()
    assert "0 of 20 solved by bob" in said("--name", "bob")
    said("--forget")
    assert "0 of 20 solved by Anna" in said()
    assert "Typical mistakes:\n  34 micro-batches: you took" in said("3.1", "--solutions")
    (tmp_path / ".decoder-harness-course.json").write_text("{")
    assert "right: 31" in said("3.1", "31")
    assert said(code=2) == ""


def test_the_course_names_exercises_pages_and_commands() -> None:
    for number, exercise in EXERCISES.items():
        assert f"| {number} {exercise.title} | " in PAGE
    titles = {lesson.title for lesson in LESSONS.values()}
    assert {*re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", PAGE)} <= titles
    for command in commands_of(PAGE):
        assert (REPOSITORY / program_of(command)).is_file(), command


@pytest.mark.parametrize("afternoon", [1, 2, 3, 4])
def test_an_afternoon_has_three_hours(afternoon: int) -> None:
    _, part, *_ = re.split(rf"## Afternoon {afternoon}: ", PAGE)
    part = part.partition("\n## ")[0]
    assert part.casefold().startswith(AFTERNOONS[afternoon - 1].casefold())
    times = re.findall(r"^\| (\d:\d\d)-(\d:\d\d) \|", part, re.MULTILINE)
    assert [times[0][0], times[-1][1]] == ["0:00", "3:00"]
    assert [end for _, end in times[:-1]] == [begin for begin, _ in times[1:]]
