"""Data in a plan: sources with equal shares, and the settings that a continued run keeps from the
previous one: packing, date and bos.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.checkpoint.compatibility import FREE_SECTIONS, recorded_run, resume_problems
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.errors import ConfigError, NoCheckpoint
from harness.files.data_format import MAX_PROBLEMS
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.run.resumption import foreseen
from tests.checkpoint.small import save
from tests.data.chat_tokenizers import STYLES, chats, tokenizer_of
from tests.data.glancing import glances
from tests.tables import beside

TABLES = beside(__file__, "data.toml")


def plan_of(*words: str, here: bool = True) -> Plan:
    settings = ["data.seq_len=16", "model.overrides.max_position_embeddings=16"]
    return make_plan(load_run_config(None, [*settings, *words]), {}, World(), here=here)


@pytest.fixture
def uneven(write_jsonl: Callable[..., Path]) -> Path:
    """Write nine English records for each German one, of equal length."""
    records = (
        {"text": "a b c d e f g h i j k", "l": "de" if n % 10 == 0 else "en"} for n in range(300)
    )
    return write_jsonl(*records)


def test_each_value_is_an_equal_source(uneven: Path, tokenizer_dir: str, cache_dir: Path) -> None:
    words = [f"data.path={uneven}", "data.balance=l", "data.held_out=0.2"]
    words += [f"data.tokenizer={tokenizer_dir}", f"data.cache_dir={cache_dir}"]
    plan = plan_of(*words)
    assert [event["message"] for event in plan.events if event["kind"] == "balanced"] == [
        "data.balance=l: sources of equal share, with records: 'de' 30, 'en' 270"
    ]
    data = build_data(DataSpec.of_run(plan.config, plan.model_config))
    assert data.names == ["de", "en"]
    assert [source.facts.documents for source in data.sources] == [30, 270]
    for samples in (2, 10, 50):
        assert data.train.batch(0, samples).sources.bincount().tolist() == [samples // 2] * 2


def test_a_plan_for_elsewhere_keeps_the_key(uneven: Path) -> None:
    plan = plan_of(f"data.path={uneven}", "data.balance=l", here=False)
    assert plan.config.data.balance == "l"


@pytest.mark.parametrize(("words", "message"), TABLES["wrong"])
def test_data_problems(words: list[str], message: str, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*({"text": "a", "l": "de", "n": number} for number in range(100)))
    with pytest.raises(ConfigError, match=message):
        plan_of(*(word.replace("PATH", str(path)) for word in words))


def test_no_two_sources_have_one_name(write_jsonl: Callable[..., Path]) -> None:
    values = ("a b", "a_b", "a_b-2", "a/b", "rehearsed", "x" * 70, "x" * 71, "", 1, "é")
    path = write_jsonl(*({"text": "a", "l": value} for value in values))
    plan = plan_of(f"data.path={path}", "data.balance=l", f"data.rehearse={path}")
    by_value = {part.where["l"]: part.name for part in plan.config.data.mix if part.where}
    assert by_value == TABLES["names"] | {"x" * 70: "x" * 60, "x" * 71: f"{'x' * 60}-2"}
    assert [*plan.config.data.sources()] == [*dict(sorted(by_value.items())).values(), "rehearsed"]


def test_data_where_stays_that_of_other_data(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*({"text": "a", "l": value, "k": "x"} for value in "ab"))
    words = [f"data.path={path}", "data.balance=l", "data.where.k=x", f"data.eval_path={path}"]
    data = plan_of(*words, "data.min_tokens=1", f"data.rehearse={path}").config.data
    assert [part.where for part in data.mix] == [{"k": "x", "l": "a"}, {"k": "x", "l": "b"}]
    for other in (data.eval_sets()[""], data.sources()["rehearsed"]):
        assert (other.where, other.min_tokens) == ({"k": "x"}, None)


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
    with pytest.raises(ConfigError, match=r"a\.csv:3: is not UTF-8"):
        plan_of(f"data.path={tmp_path / 'a.csv'}", "data.balance=l")


@pytest.mark.parametrize("style", STYLES)
def test_dry_run_counts_chats(style: str, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*({"messages": chat} for chat in chats(200, tools=False)))
    tokenizer_of(style).save_pretrained(tmp_path / "tokenizer")
    words = (f"data.path={path}", "data.seq_len=64", f"data.tokenizer={tmp_path / 'tokenizer'}")
    config = load_run_config(None, [*words, f"data.cache_dir={tmp_path / 'cache'}"]).data
    data, seen = build_data(DataSpec(config)), glances(config)
    assert seen.sources[""].tokens == data.tokens
    assert seen.counts().windows == pytest.approx(data.train.samples, rel=0.03)
    assert seen.notes() == [*data.warnings()]


def test_a_dry_run_counts_texts_roughly_as_the_run_does(
    uneven: Path, tokenizer_dir: str, library: Data, cache_dir: Path
) -> None:
    for known in (f"data.tokenizer={tokenizer_dir}", f"data.cache_dir={cache_dir}"):
        (seen,) = glances(load_run_config(None, [known]).data).sources.values()
        assert seen.documents == library.documents
        assert seen.tokens == pytest.approx(library.tokens, rel=0.15)
    words = (f"data.tokenizer={tokenizer_dir}", f"data.cache_dir={cache_dir}")
    for more in ("data.where.l=de", "data.min_tokens=2"):
        own = (f"data.path={uneven}", "data.seq_len=4", more)
        config = load_run_config(None, [*words, *own]).data
        (seen,) = glances(config).sources.values()
        assert seen.tokens == build_data(DataSpec(config)).tokens


def test_dry_run_without_transformers_counts_bytes(
    uneven: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"data.path={uneven}", f"data.tokenizer={tokenizer_dir}", "data.seq_len=16")
    config = load_run_config(None, [*words]).data
    exact = glances(config).lines(10)[0]
    monkeypatch.setattr("harness.data.glance.importlib.util.find_spec", lambda name: None)
    rough = glances(config).lines(10)[0]
    assert "roughly" in rough
    assert "roughly" not in exact


def begun(folder: Path, *words: str) -> dict[str, object]:
    """Write the plan.json of a run."""
    record = plan_of(*words).to_json()
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(record))
    return record


def test_sections_that_may_change_exist() -> None:
    assert {*FREE_SECTIONS} <= {*RunConfig.model_fields}


@pytest.mark.parametrize(("words", "other", "before"), TABLES["other_values"])
def test_another_value_must_be_allowed(words: list[str], other: str, before: str, tmp_path) -> None:
    record = begun(tmp_path / "run", *words)
    plan = plan_of(f"run.dir={tmp_path / 'run'}", other).to_json()
    (problem,), (key, _, value) = resume_problems(record, plan, []), other.partition("=")
    assert f"{key} is {value!r}, but the run in this folder has {before!r}: keep its" in problem
    assert resume_problems(record, plan, [key]) == []


def test_dry_run_names_resumable_run_or_the_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (f"run.dir={folder}", "train.steps=9")
    assert foreseen(plan_of(*words)) == []
    begun(folder, *words)
    status = {"outcome": "stopped", "step": 4, "attempt": 1}
    (folder / "status.json").write_text(json.dumps(status))
    (text,) = foreseen(plan_of(*words))
    assert text.endswith(", stopped at step 4: no checkpoint, so it starts again")
    for step in (2, 10, 11):
        save(folder / "checkpoints", step)
    (folder / "checkpoints" / "step-00000011" / "manifest.json").unlink()
    ignored, text = foreseen(plan_of(words[0], "train.steps=12"))
    assert ignored.endswith("step-00000011/manifest.json is not there")
    assert text.endswith(": it is resumed from step-00000010")
    with pytest.raises(ConfigError) as refused:
        foreseen(plan_of(*words, "optim.lr=0.5", "train.seed=3"))
    problems = [problem.partition(": ")[2] for problem in refused.value.problems]
    assert [problem.split()[0] for problem in problems[:2]] == ["train.seed", "optim.lr"]
    assert problems[2].startswith("the run has 9 steps, but its newest checkpoint is from step 10:")
    for path in folder.glob("checkpoints/*/*"):
        path.write_bytes(b"")
    with pytest.raises(NoCheckpoint, match=r"or start again in another run\.dir"):
        foreseen(plan_of(words[0], "train.steps=12"))


@pytest.mark.parametrize(("source", "problem"), TABLES["branches"])
def test_dry_run_rejects_a_branch_as_the_run(source: str, problem: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run, "model.overrides.vocab_size=8")
    save(run / "checkpoints", 2)
    for name in TABLES["files"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    words = (f"resume.from={tmp_path / source}", f"run.dir={tmp_path / 'new'}", "train.steps=1")
    with pytest.raises(ConfigError) as refused:
        foreseen(plan_of(*words, "model.overrides.vocab_size=8"))
    expected = problem.format(run=run).replace("run/../", "")
    assert expected in str(refused.value)


def test_an_export_that_would_replace_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"^save\.export: .*/export exists and is not an exported"
    ):
        plan_of(f"run.dir={tmp_path}", here=True)
    assert plan_of(f"run.dir={tmp_path}", "save.export=false", here=True)
    (tmp_path / "export").unlink()
    (tmp_path / "export").mkdir()
    assert plan_of(f"run.dir={tmp_path}", here=True)


def test_a_new_run_begins_texts_and_has_the_date_of_today() -> None:
    data = plan_of().config.data
    assert (data.date, data.bos) == (datetime.now(UTC).date().isoformat(), "auto")


def test_record_may_hold_the_default_of_an_excluded_key(tmp_path: Path) -> None:
    words = ("optim.warmup_ratio=0.03", "optim.clip_value=1.0")
    record = plan_of(f"run.dir={tmp_path / 'run'}", *words).to_json()
    optim = recorded_run(record["run"]).optim
    assert (optim.warmup_ratio, optim.clip_value) == (0.03, 1.0)
    assert optim.warmup(200) == 6
