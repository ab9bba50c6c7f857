"""Advice works: each option that a message names, followed once, gets past that message.

The lines are those of tests/plan/refusals, of tests/plan/notes.toml, and of advised_data.py, whose
data is read as a run reads it. Needs no device and no ranks. A requirement ("it must be at least
1") is not advice.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from harness.config.ds_json import Event
from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.data.tokenizer import train_tokenizer
from harness.errors import ConfigError
from harness.estimate.fit import changes_that_help, helpful_changes
from harness.files.corpus import find_corpus
from harness.plan.make import takes
from harness.plan.plan import Plan
from harness.plan.weights import weight_file_problems
from harness.run.data_decisions import decide_from_data
from harness.run.progress import Progress
from tests.advice import ADVICE, Message, NoWay, followed
from tests.advised_data import DATA, ROWS, TEXT
from tests.plan.plans import Planner
from tests.plan.test_tables import FOLDER, rows
from tests.tables import beside

HARNESS = Path(__file__).parents[1] / "harness"
HERE = "$here"
MOST_STEPS = 4  # from a message to a run


class Line(NamedTuple):
    """A command line, and the name of its data."""

    words: str
    data: str = ""
    noted: bool = False
    """True if the message is a note, which may need an estimate."""


LINES = [
    *(Line(words) for words, _ in rows(*(FOLDER / "refusals").glob("*.toml"))),
    *(Line(words, noted=True) for words, patterns in rows(FOLDER / "notes.toml") if patterns),
    *(Line(words, data) for data, words, _ in ROWS),
]


class Speaker:
    """Returns a run's messages about a command line and its data, before a device is used."""

    def __init__(self, folder: Path) -> None:
        self.planned, self._folder = Planner(folder), folder
        self._said: dict[Line, tuple[list[str], list[str]]] = {}
        (folder / "text.txt").write_text(f"{TEXT}\n" * 20)
        train_tokenizer([find_corpus(str(folder / "text.txt"))], folder / "small", 300)

    def __call__(self, line: Line) -> tuple[list[str], list[str]]:
        """Return the refusals; without any, the notes."""
        if line not in self._said:
            self._said[line] = self._answer(line)
        return self._said[line]

    def _answer(self, line: Line) -> tuple[list[str], list[str]]:
        try:
            plan = self.planned(self._words(line), estimate=line.noted)
            events = [*plan.events, *(self._settled(plan) if line.data else [])]
        except ConfigError as error:
            return [self._plain(problem, line) for problem in error.problems], []
        said = [event["message"] for event in events if "message" in event]
        return [], [self._plain(message, line) for message in said]

    def _words(self, line: Line) -> str:
        """Return the words with the data's folder, which is created if missing."""
        if not line.data:
            return line.words
        here = self._here(line)
        if not here.is_dir():
            here.mkdir()
            DATA[line.data](here)
        cache = f"data.cache_dir={self._folder / 'cache'}"
        return f"{cache} {line.words.replace(HERE, str(here))}"

    def _here(self, line: Line) -> Path:
        return self._folder / f"data{[*DATA].index(line.data)}"

    def _plain(self, sentence: str, line: Line) -> str:
        if line.data:
            sentence = sentence.replace(str(self._here(line)), HERE)
        return sentence.replace(f"{self._folder}/", "$")

    def _settled(self, plan: Plan) -> list[Event]:
        """Read the data as a run does; return its events. Raises ConfigError."""
        source = plan.config.model.init_from
        if source and (problems := weight_file_problems(source, opens=True)):
            raise ConfigError(problems)
        data = build_data(DataSpec.of_run(plan.config, plan.model_config))
        return decide_from_data(plan, data, torch.device("cpu"), Progress(enabled=False))[2]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    return Speaker(tmp_path_factory.mktemp("lines"))


def way_back(speaker: Speaker, line: Line, kinds: list[str], steps: int = MOST_STEPS) -> str:
    """Return the reason why a line does not get past the first of `kinds` of messages; "" if
    it does.

    New messages are also followed, by one of their options; none may simply undo the first one.
    """
    refusals, notes = speaker(line)
    said = [Message(text) for text in refusals or notes]
    if again := [message for message in said if message.kind == kinds[0]]:
        return f"again: {again[0].text}"
    for message in said if refusals else []:
        if message.kind in kinds or not message.phrases:
            continue
        reasons = []
        for words in message.ways():
            try:
                then = line._replace(words=followed(line.words, words))
                known = [kinds[0], message.kind, *kinds[1:]]
                why = way_back(speaker, then, known, steps - 1) if steps else "too far"
            except NoWay as error:
                why = str(error)
            if not why:
                break
            reasons.append(f"{words}: {why}")
        else:
            return f"then: {message.text}\n  " + "\n  ".join(reasons)
    return ""


@pytest.mark.gate("plan")
@pytest.mark.parametrize("line", LINES)
def test_each_way_out_leads_out(line: Line, speaker: Speaker) -> None:
    refusals, notes = speaker(line)
    said = [Message(text) for text in refusals or notes]
    assert line.data or line.noted != bool(refusals), refusals
    if line.data:
        expected = next(says for data, words, says in ROWS if (words, data) == line[:2])
        assert any(expected in message.text for message in said), refusals
    for message in said:
        for words in message.ways():
            then = line._replace(words=followed(line.words, words))
            why = way_back(speaker, then, [message.kind, *(other.kind for other in said)])
            assert not why, f"{message.text}\n{words}\n{why}"


@pytest.mark.gate("plan")
def test_no_key_is_advised_that_is_set_already(speaker: Speaker) -> None:
    for line in LINES:
        refusals, notes = speaker(line)
        for message in map(Message, refusals or notes):
            already = [key for key in message.left_open if f" {key}=" in f" {line.words}"]
            assert not already, (line, message.text)


NOT_FOLLOWED: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("advice_not_followed.toml").read_text(encoding="utf-8")
)
_ROOMS = "config plan layout estimate files data models checkpoint run engine guard"
_BEGINS = re.compile(rf"(?:^|[:;,] |\(){ADVICE.pattern}")


def advising(path: Path) -> Iterator[list[str]]:
    """Yield the messages with advice in a file, each as the texts between its values."""
    if path.suffix == ".toml":
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        rules, advice = table.get("rule", ()), table.get("advice", {})
        texts = [*(rule["why"] for rule in rules), *advice.values()]
        yield from ([text] for text in texts if _BEGINS.search(text))
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    others: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.Assert):  # docstrings and assertions
            others |= {id(part) for part in ast.walk(node)}
        if isinstance(node, ast.JoinedStr):
            others |= {id(part) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in others or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
        whole = "...".join(str(text or "") for text in texts)
        if " " in whole.strip() and _BEGINS.search(whole):
            yield [text for text in texts if isinstance(text, str)]


def _is_of(message: str, left_out: str) -> bool:
    place, _, part = left_out.partition(": ")
    return re.match(rf"{place}[:/]", message) is not None and part in message


@pytest.mark.gate("plan")
def test_all_messages_that_advise_are_followed(speaker: Speaker) -> None:
    said = "\n".join(text for line in LINES for texts in speaker(line) for text in texts)
    left_out = {each for of_reason in NOT_FOLLOWED.values() for each in of_reason}
    missing, needed = [], set[str]()
    for room in (*_ROOMS.split(), "loop.py", "train.py"):
        paths = (HARNESS / room).rglob("*") if (HARNESS / room).is_dir() else [HARNESS / room]
        for path in sorted(path for path in paths if path.suffix in (".py", ".toml")):
            for texts in advising(path):
                if re.search("[^\n]*".join(map(re.escape, texts)), said):
                    continue
                message = f"{path.relative_to(HARNESS)}: {'...'.join(texts)}"
                reasons = {each for each in left_out if _is_of(message, each)}
                needed |= reasons
                missing += [] if reasons else [message]
    assert not missing, "\n".join(missing)
    assert needed == left_out


@pytest.mark.parametrize("words", beside(__file__, "too_large.toml")["plans"])
def test_a_change_that_saves_memory_is_planned(words: str, speaker: Speaker) -> None:
    planned = speaker.planned
    plan = planned(words)
    assert plan.estimate is not None
    ways = takes(plan)
    changes = [change.text for change in helpful_changes(plan.estimate) if "=" in change.text]
    refused = [change for change in changes if not _is_planned(planned, followed(words, change))]
    assert refused == [change for change in changes if not ways.accept(change)]
    shown = changes_that_help(plan.estimate, 1, ways)
    assert refused
    assert not [change for change in refused if f"{change} (" in shown]


def _is_planned(planned: Planner, words: str) -> bool:
    try:
        return bool(planned(words, estimate=False))
    except ConfigError:
        return False
