from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from harness.files.data_format import MAX_PROBLEMS
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan


def plan_of(*words: str, here: bool = True) -> Plan:
    settings = ["data.seq_len=16", "model.overrides.max_position_embeddings=16"]
    return make_plan(load_run_config(None, [*settings, *words]), {}, World(), here=here)


@pytest.fixture
def uneven(write_jsonl: Callable[..., Path]) -> Path:
    """Nine English records for each German one, of equal length."""
    records = (
        {"text": "a b c d e f g h i j k", "l": "de" if n % 10 == 0 else "en"} for n in range(300)
    )
    return write_jsonl(*records)


def test_each_value_is_a_source_of_equal_share(
    uneven: Path, tokenizer_dir: str, cache_dir: Path
) -> None:
    words = [f"data.path={uneven}", "data.balance=l", "data.held_out=0.2"]
    words += [f"data.tokenizer={tokenizer_dir}", f"data.cache_dir={cache_dir}"]
    plan = plan_of(*words)
    assert [event["message"] for event in plan.events if event["kind"] == "balanced"] == [
        "data.balance=l: sources of equal share, with records: 'de' 30, 'en' 270"
    ]
    data = build_data(DataSpec.of_run(plan.config, plan.model_config))
    assert data.names == ["de", "en"]
    assert [of.facts.documents for of in data.sources] == [30, 270]
    for samples in (2, 10, 50):
        assert data.train.batch(0, samples).sources.bincount().tolist() == [samples // 2] * 2


def test_a_plan_for_elsewhere_keeps_the_key(uneven: Path) -> None:
    plan = plan_of(f"data.path={uneven}", "data.balance=l", here=False)
    assert plan.config.data.balance == "l"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.balance=l"], r"data\.balance without data\.path"),
        (["data.balance=l", 'data.mix=[{path="a"}]'], r"data\.balance and data\.mix exclude"),
        (
            ["data.path=PATH", "data.balance=m"],
            r"data\.jsonl:1: has no 'm'.*it has 'text', 'l', 'n'",
        ),
        (["data.path=PATH", "data.balance=n"], r"'n', which has more than 64 values"),
        (["data.path=PATH", "data.balance=l", "data.where.l=fr"], "no record to read"),
    ],
)
def test_problems_are_named(
    words: list[str], message: str, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl(*({"text": "a", "l": "de", "n": number} for number in range(100)))
    with pytest.raises(ConfigError, match=message):
        plan_of(*(word.replace("PATH", str(path)) for word in words))


def test_values_are_made_names(write_jsonl: Callable[..., Path]) -> None:
    values = ("a/b", "a b", "", 1, "é")
    path = write_jsonl(*({"text": "a", "l": value} for value in values))
    names = [of.name for of in plan_of(f"data.path={path}", "data.balance=l").config.data.mix]
    assert names == ["none", "1", "a_b", "a_b-2", "é"]


def test_no_two_sources_have_one_name(write_jsonl: Callable[..., Path]) -> None:
    values = ("a b", "a_b", "a_b-2", "a/b", "rehearsed", "x" * 70, "x" * 71)
    path = write_jsonl(*({"text": "a", "l": value} for value in values))
    plan = plan_of(f"data.path={path}", "data.balance=l", f"data.rehearse={path}")
    by_value = {of.where["l"]: of.name for of in plan.config.data.mix if of.where}
    assert by_value == {
        "a b": "a_b-3",
        "a_b": "a_b",
        "a_b-2": "a_b-2",
        "a/b": "a_b-4",
        "rehearsed": "rehearsed-2",
        "x" * 70: "x" * 60,
        "x" * 71: f"{'x' * 60}-2",
    }
    assert [*plan.config.data.sources()] == [*dict(sorted(by_value.items())).values(), "rehearsed"]


def test_data_where_stays_that_of_other_data(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*({"text": "a", "l": value, "k": "x"} for value in "ab"))
    words = [f"data.path={path}", "data.balance=l", "data.where.k=x", f"data.eval_path={path}"]
    data = plan_of(*words).config.data
    assert [of.where for of in data.mix] == [{"k": "x", "l": "a"}, {"k": "x", "l": "b"}]
    assert data.eval_sets()[""].where == {"k": "x"}


def test_counting_ends_with_what_decides(tmp_path: Path) -> None:
    """Neither unique values nor bad lines are read to the end of the corpus."""
    unique = (json.dumps({"text": "a", "l": number}) + "\n" for number in range(70))
    (tmp_path / "a.jsonl").write_text("".join(unique) + "{\n")
    with pytest.raises(ConfigError, match="more than 64 values") as raised:
        plan_of(f"data.path={tmp_path}", "data.balance=l")
    assert "a.jsonl:71" not in str(raised.value)
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("no columns")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "l": "b"}\n')
    with pytest.raises(ConfigError) as raised:
        plan_of(f"data.path={tmp_path}", "data.balance=l")
    assert len(raised.value.problems) == MAX_PROBLEMS
    (tmp_path / "a.csv").write_bytes(b"text,l\na,b\n\xff,b\n")
    with pytest.raises(ConfigError, match=r"a\.csv:3: is no UTF-8"):
        plan_of(f"data.path={tmp_path / 'a.csv'}", "data.balance=l")
