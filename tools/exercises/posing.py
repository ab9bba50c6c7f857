"""An exercise with a student's numbers: drawn from the name, shown as text, judged."""

import hashlib
import math
import re
import shlex
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.estimate.memory_item import GIB
from harness.files.paths import script
from harness.report.formatting import short
from harness.terminal import COLUMNS, wrapped_command
from tools.studio_app.page import LESSONS

_STUDIO = "http://127.0.0.1:8230"
"""Where tools/studio.py listens by default."""
_MOST_DRAWS = 100
_ANSWER = re.compile(r"([\d.,_' ]*\d)(?:[eE]([-+]?\d{1,3}))?\s*([^\d\s].*)?")
_NUMBER = re.compile(r"(?=.)(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.\d+)?")


@dataclass(frozen=True)
class Exercise:
    """A table of exercises.toml, which explains it."""

    number: str
    title: str
    task: str
    unit: str
    within: float
    learned: str
    draw: Mapping[str, Sequence[Any]]
    mistakes: Mapping[str, str]
    commands: Sequence[str] = ()
    pages: Sequence[str] = ()
    file: str = ""
    truth: float = 0.0
    """The answer for a student's numbers."""
    wrong: Sequence[tuple[float, str]] = ()
    """Answers of typical mistakes, and what was missed."""

    def text(self) -> str:
        """Return the task and what to use, in lines of 80 columns."""
        used = [line for c in self.commands for line in wrapped_command(f"  {as_run(c)}", COLUMNS)]
        for address in self.pages:
            title = LESSONS[address.partition("?")[0]].title
            used.append(f'  page "{title}" of {as_run("python tools/studio.py")}:')
            used.append(f"    {_STUDIO}/{address}")
        return "\n\n".join(filter(None, (filled(self.task, 0), self.file, "\n".join(used))))

    def shown(self, value: float) -> str:
        """Return an answer as text."""
        number = f"{value:,.0f}" if not self.within or value >= 1000 else short(value, 4)
        return f"{number} {self.unit}".strip()

    def judge(self, text: str) -> list[str]:
        """Return which mistakes an answer may come from, or whether it is too high or too low;
        empty if it is right. Raises ConfigError for text that is no answer.
        """
        values = read_answer(text, self.unit)
        if any(self.is_near(value, self.truth) for value in values):
            return []
        near = [why for wrong, why in self.wrong if any(self.is_near(v, wrong) for v in values)]
        side = "too high" if values[0] > self.truth else "too low"
        return near or [f"it is {side}, and no typical mistake gives it"]

    def is_near(self, value: float, answer: float) -> bool:
        """Return True if a value counts as that answer."""
        return abs(value - answer) <= max(self.within / 100, 1e-9) * abs(answer)


_TABLES = tomllib.loads(Path(__file__).with_name("exercises.toml").read_text(encoding="utf-8"))
AFTERNOONS: list[str] = [each["title"] for each in _TABLES["afternoons"]]
EXERCISES = {
    (key := f"{afternoon}.{number}"): Exercise(key, **table)
    for afternoon, each in enumerate(_TABLES["afternoons"], 1)
    for number, table in enumerate(each["exercises"], 1)
}


def posed(exercise: Exercise, name: str) -> Exercise:
    """Return an exercise with a student's numbers: those of the first draw that makes one."""
    from tools.exercises.truths import TRUTHS, Draw  # it plans: a list of exercises does without

    for attempt in range(_MOST_DRAWS):
        drawn = _drawn(exercise, f"{name.casefold()} {exercise.number} {attempt}")
        commands = [command.format(**drawn) for command in exercise.commands]
        file = exercise.file.format(**drawn)
        found = TRUTHS[exercise.number](Draw(commands=commands, file=file, **drawn))
        if found is None:
            continue
        values, truth = {**drawn, **found, "GIB": GIB}, found["truth"]
        mistakes = {**_TABLES["mistakes"].get(exercise.unit, {}), **exercise.mistakes}
        wrong = [
            (answer, why.format(**values))
            for key, why in mistakes.items()  # a key is arithmetic of our own file: truth / tensor
            if (answer := eval(key, {}, values)) > 0 and (exercise.within or answer % 1 == 0)
            if not exercise.is_near(answer, truth)
        ]
        pages = [page.format(**values) for page in exercise.pages]
        text = {"task": exercise.task.format(**values), "commands": commands, "pages": pages}
        return replace(exercise, **text, file=file, truth=truth, wrong=wrong)
    raise ConfigError(f"exercise {exercise.number} has no numbers for {name}: take another --name")


def _drawn(exercise: Exercise, seed: str) -> dict[str, Any]:
    """Return a value of each list, by a hash that is the same on every machine."""
    digits, values = int.from_bytes(hashlib.sha256(seed.encode()).digest()), dict[str, Any]()
    for name, options in exercise.draw.items():
        digits, place = divmod(digits, len(options))
        values[name] = options[place]
    return values


def read_answer(text: str, unit: str) -> list[float]:
    """Return an answer in `unit`: each number that its text may mean, for 1,234 both 1234 and
    1.234. Raises ConfigError with one line for anything else.
    """
    power_of_two = re.fullmatch(r"2\^(-?\d{1,3})", text.strip())
    text = str(2.0 ** int(power_of_two[1])) if power_of_two else text
    match = _ANSWER.fullmatch(text.strip())
    digits, power, typed = match.groups() if match else ("", "", "")
    name, sizes = (typed or unit).casefold(), _TABLES["units"].get(unit, {})
    if name not in (unit.casefold(), unit.casefold().rstrip("s"), *sizes):
        takes = f"in {unit}" if unit else "a number without a unit"
        raise ConfigError(f"{name[:40]!r} is no unit of this answer, which is {takes}")
    size, digits = float(f"1e{power or 0}") * sizes.get(name, 1.0), re.sub("[ _']", "", digits)
    readings = (digits, digits.translate({ord(","): ".", ord("."): ","}))
    values = [size * float(r.replace(",", "")) for r in readings if _NUMBER.fullmatch(r)]
    if not values or not all(0 < value < math.inf for value in values):
        example = f"37.2 {unit}".strip()
        raise ConfigError(f"{text[:40]!r} is no answer: write a number above 0, as in {example}")
    return values


def as_run(command: str) -> str:
    """Return a command with the path of its program, as a shell in the current folder takes it."""
    python, program, *words = shlex.split(command)
    return shlex.join([python, script(program), *words])


def filled(text: str, indent: int = 2) -> str:
    """Return text in lines of 80 columns, with a hanging indent."""
    return textwrap.fill(text, COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)
