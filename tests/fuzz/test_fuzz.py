"""The rule can be broken, and is seen to be; a few inputs of every kind keep it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import rule
from tests.fuzz.base import build_base
from tests.fuzz.case import VALID_EVERY, Base, Case, Place
from tests.fuzz.fuzzer import Fuzzer, Name, made, names, remove, tried
from tests.fuzz.kinds.table import KINDS
from tests.fuzz.report import counted, table, unbalanced
from tools.proofs.zygote import Zygote

# Of the seed that `make fuzz` begins with, so that a failure there is one here.
SEED = 0
INPUTS = {**dict.fromkeys(KINDS, 4), "config": 12, "words": 12, "json": 12, "arguments": 12}


@pytest.fixture(scope="module")
def base(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return build_base(zygote, tmp_path_factory.mktemp("fuzz") / "base")


@pytest.fixture
def place(base: Base, tmp_path: Path) -> Place:
    folder = tmp_path / "input"
    folder.mkdir()
    return Place(folder, base)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("traceback", rule.TRACEBACK),
        ("memory", rule.TRACEBACK),
        ("wait", rule.HANG),
        ("executed", rule.EXECUTED),
        ("written", rule.WRITTEN),
        ("leaked", rule.LEAKED),
        ("exit code", rule.CODE),
        ("last words", rule.CODE),
    ],
)
def test_a_planted_fault_is_reported(zygote: Zygote, place: Place, how: str, kind: str) -> None:
    place.secret()
    case = Case([how, str(place.marker)], how, main="tests.fuzz.planted")
    result = tried(zygote, Name(SEED, "config", 0), case, place, limit_s=4)
    assert [fault.kind for fault in result.faults] == [kind], result.outcome.output
    if how == "last words":
        assert result.faults[0].message == "code 1: planted"
    if kind == rule.HANG:
        assert "planted.py" in result.outcome.output  # where it stood


def test_a_valid_input_must_be_accepted(zygote: Zygote, place: Place) -> None:
    case = Case(["optim.lr=-1", "--dry-run"], "refused", valid=True)
    result = tried(zygote, Name(SEED, "config", 0), case, place)
    assert [fault.kind for fault in result.faults] == [rule.NOT_ACCEPTED]


def test_an_input_is_always_the_same(base: Base, tmp_path: Path) -> None:
    for kind in KINDS:
        for index in range(3):
            pictures = []
            for _ in range(2):
                place = Place(tmp_path / "input", base)
                remove(place.folder)
                place.folder.mkdir()
                case = made(Name(SEED, kind, index), place)
                sizes = {k: v[:2] for k, v in rule.files_in(place.folder).items()}
                pictures.append((case, sizes))
            assert pictures[0] == pictures[1], (kind, index)


def test_a_kind_that_this_machine_cannot_make_says_so(
    zygote: Zygote, base: Base, tmp_path: Path
) -> None:
    without = Base(base.folder / "lost")
    result = Fuzzer(tmp_path, without, [zygote]).one(Name(SEED, "tokenizer", 0))
    assert [fault.kind for fault in result.faults] == [rule.NOT_MADE]
    assert "this machine cannot make it: FileNotFoundError" in result.faults[0].message
    assert counted([result])["tokenizer"]["other faults"] == 1


def test_kinds_share_the_inputs() -> None:
    chosen = names(SEED, 1500)
    assert len(chosen) == 1500
    assert {name.kind for name in chosen} == {*KINDS}
    assert names(SEED, 150)[0] in chosen


def test_the_table_says_what_hardly_passes_or_fails(zygote: Zygote, place: Place) -> None:
    fine = tried(zygote, Name(SEED, "config", 0), Case(["--keys"], "", valid=True), place)
    counts = counted([fine] * 40)
    assert "| config       |     40 |    40 |     0 |" in table(counts)
    assert unbalanced(counts) == ["config: 0 of 40 are refused, less than 10%"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_each_kind_keep_the_rule(
    zygote: Zygote, base: Base, tmp_path: Path, kind: str
) -> None:
    """More in `make fuzz`. The first is valid."""
    fuzzer = Fuzzer(tmp_path, base, [zygote])
    count = INPUTS[kind]
    assert 3 <= count <= VALID_EVERY * 3
    for result in fuzzer.each([Name(SEED, kind, index) for index in range(count)]):
        assert result.faults == [], f"{result.name} ({result.case.note})\n{result.outcome.output}"
