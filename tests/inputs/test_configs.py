"""Wrong run configs, words, DeepSpeed JSONs, models, arguments and records."""

import json
import os
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from harness.config.assignments import value_as_text
from harness.config.run_config import known_keys
from harness.errors import ExitCode
from harness.files.chat import Chat
from harness.files.forms import read
from harness.files.pieces import Ids
from harness.plan.memory import Untraceable
from tests.inputs import values
from tests.inputs.rule import GATE, MANY, MARKER, each, keeps_the_rule, tried
from tests.inputs.values import JSON, Draw, encoded, escaped, toml_document
from tests.real_runs import REPOSITORY
from tests.tables import beside

_TABLES = beside(__file__, "configs.toml", with_parts=True)
_VALID: dict[str, dict[str, list[Any]]] = _TABLES["valid"]
_KEYS = (*known_keys(), *(f"ds.{key}" for key in _TABLES["ds_keys"].split()))
_REFUSED: list[str] = escaped(_TABLES["refused"]).split()  # | separates words
_LISTED = [*_TABLES["listed"].split(), "", "train.steps =1", "train.steps=1\ntrain.seed=2"]
_LISTED += [*(f"optim.betas={raw.decode()}" for raw in values.RAW), f"ds.{'a.' * 2999}a=1"]
_JSONS = [json.loads(path.read_text()) for path in sorted(REPOSITORY.glob("ds_configs/*.json"))]
_JSONS.append(_TABLES["json"])
_MODELS: list[dict[str, Any]] = [
    {"model_type": model_type, **keys} for model_type, keys in _TABLES["models"].items()
]
_FILES: dict[str, tuple[str, list[Any], Callable[[Any], bytes]]] = {
    "--deepspeed=ds.json": ("ds.json", _JSONS, encoded),
    "model.name=config.json": ("config.json", _MODELS, encoded),
    "--config=run.toml": ("run.toml", [], toml_document),
}
_WORDS = st.sampled_from([*_LISTED, *(word for word in _REFUSED if "|" not in word)])
_WORDS |= st.from_regex(r"-{1,2}[a-z_-]{0,9}(=\S{0,5})?", fullmatch=True)
_WORDS |= st.builds(
    lambda key, form, value: f"{form.format(key)}={value_as_text(value)}",
    st.sampled_from(_KEYS), st.sampled_from(("{}", "{}", "{}", "{}.x", "x{}", "ds.{}")), JSON,
)  # fmt: skip


@st.composite
def plans(draw: Draw) -> tuple[list[str], dict[str, bytes], bool]:
    """Return arguments of a dry run, the files that they name, and True if all are valid."""
    is_valid, tree = draw(st.sampled_from((True, *[False] * 5))), dict[str, Any]()
    for name in draw(st.lists(st.sampled_from([*_VALID]), min_size=2, max_size=6, unique=True)):
        choices = {key: st.sampled_from(options) for key, options in _VALID[name].items()}
        tree[name] = draw(st.fixed_dictionaries({}, optional=choices))
    argument = draw(st.sampled_from((*_FILES, "", "")))
    if not argument:
        argv = [f"{a}.{key}={value_as_text(tree[a][key])}" for a in tree for key in tree[a]]
        wrong = [] if is_valid else draw(st.lists(_WORDS, min_size=1, max_size=2))
        words = draw(st.permutations([*argv, *wrong]))
        return [word.replace("\0", "")[:100_000] for word in words], {}, is_valid
    file, trees, as_bytes = _FILES[argument]
    content = deepcopy(draw(st.sampled_from(trees or [tree])))
    key = draw(st.sampled_from(known_keys() if not trees else [*content] or ["a"])).split(".")
    if not is_valid and draw(st.booleans()):
        data = draw(values.changed(content).map(as_bytes) | values.damaged(as_bytes(content)))
        return [argument], {file: data}, False
    if not is_valid:
        holder = content if trees else content.setdefault(key[0], {})
        holder[key[-1]] = draw(st.sampled_from(("bert", "mamba", "llava", "os")) | JSON)
    return [argument], {file: as_bytes(content)}, is_valid and trees is not _JSONS


@pytest.fixture
def planned(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that makes a dry run with some arguments and files."""

    def not_traced(request: object) -> None:
        raise Untraceable  # it would run in another process for seconds

    def plan(argv: list[str], files: dict[str, bytes] | None = None) -> int:
        for name, data in (files or {}).items():
            Path(name).write_bytes(data)
        return keeps_the_rule("harness.train", ["--dry-run", *argv], files)

    monkeypatch.setattr("harness.plan.memory.traced", not_traced)
    return plan


@MANY
def test_drawn_configs_are_planned_or_refused(planned: Any, count: int) -> None:
    def test(drawn: tuple[list[str], dict[str, bytes], bool]) -> None:
        is_planned = planned(*drawn[:2]) in (ExitCode.DONE, ExitCode.DOES_NOT_FIT)
        assert is_planned or not drawn[2]

    each(count, plans(), test)


def test_listed_words_are_planned_or_refused(planned: Any) -> None:
    for word in (*_LISTED, *(f"run.dir={json.dumps(text)}" for text in values.TEXTS)):
        planned([word[:100_000]])
    for words in _REFUSED:
        assert planned(words.split("|")) == 2, words
    for twice in (b'{"a": 1, "a": 2}', b'{"fp16": {"enabled": true, "enabled": false}}'):
        assert planned(["--deepspeed=ds.json"], {"ds.json": twice}) == 2


@pytest.mark.parametrize("kind", values.NO_FILES)
def test_a_config_that_is_no_regular_file_is_refused(planned: Any, kind: str) -> None:
    for argument in ("--config=x", "--deepspeed=x", "model.name=./x"):
        values.replace(Path("x"), kind)
        assert planned([argument]) == 2


@GATE
@pytest.mark.parametrize("line", escaped(_TABLES["tools"]).split("\n")[:-1])
def test_wrong_arguments_of_a_tool_are_refused(place: Path, line: str) -> None:
    tool, _, wrong = line.partition(": ")
    for words in wrong.split("|"):
        keeps_the_rule(tool, words.split(" ") if words else [])


TURNS: list[dict[str, Any]] = _TABLES["parts"]["turns"]
_RECORDS: list[dict[str, Any]] = _TABLES["records"]


def _is_document_or_problem(record: Any) -> None:
    try:
        document = read(record, {})[0]
        for piece in [] if isinstance(document, Chat | Ids) else document:
            piece.text.encode()  # also raises a ValueError at a lone surrogate
    except ValueError:
        return
    if isinstance(document, Chat):
        assert all(isinstance(turn["content"], str) for turn in document.messages)
        assert document.num_learned <= document.num_characters


@MANY
def test_a_changed_record_is_a_document_or_a_problem(count: int) -> None:
    changed = st.sampled_from(_RECORDS).flatmap(values.changed)
    each(count * 5, changed.filter(lambda new: type(new) is dict), _is_document_or_problem)
    for other in (other for record in _RECORDS for other in values.variants(record)):
        _is_document_or_problem(other)


def main(argv: list[str]) -> int:
    """Violate the rule as the first argument says."""
    how, actions = argv[0], {
        "raise": lambda: 1 // 0, "wait": lambda: time.sleep(99), "exit": lambda: sys.exit("last"),
        "written": lambda: Path("left").touch(), "executed": lambda: Path(MARKER).touch(),
        "leaked": lambda: Path("copy").write_bytes(Path("secret.txt").read_bytes()),
        "memory": lambda: [bytes(2**20) for _ in range(2**20)], "os": lambda: os._exit(4),
    }  # fmt: skip
    actions.get(how, int)()
    return {"leaked": 0, "code": 4}.get(how, 2)


@pytest.mark.parametrize("how", _TABLES["faults"].split())
def test_a_broken_rule_is_reported(place: Path, how: str) -> None:
    (fault,) = tried(__name__, [how.split(":")[0]], limit_s=5)[2]
    assert fault.startswith(how.split(":")[-1])
