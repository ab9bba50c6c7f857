"""Folders as the hub and git leave them: which files are read."""

from pathlib import Path

import pytest

from harness.config.data_section import DataConfig
from harness.config.run_file import load_run_config
from harness.data.pair import write_indexed
from harness.errors import ConfigError
from harness.files.corpus_files import find_files, splits_in
from harness.files.splits import TO_EVALUATE, _best, is_card, matches, splits_of, subsets_of
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.data.glancing import glance
from tests.files.test_contents import LINES, POINTER, TURNS, documents, lines
from tests.tables import beside

TABLES = beside(__file__, "hub_folders.toml")
CARD, TWO_SUBSETS = TABLES["card"], TABLES["two_subsets"]


def fill(folder: Path, *names: str, content: str | bytes = LINES) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def read(folder: Path, split: str | None = None) -> list[str]:
    found = find_files(str(folder), split=split).files
    return [file.relative_to(folder).as_posix() for file in found]


def test_a_data_set_of_the_hub_is_its_train_split(tmp_path: Path) -> None:
    train, test = (f"data/{name}-00000-of-00001.jsonl" for name in ("train", "test"))
    fill(tmp_path, train, test, "LICENSE", "CITATION.cff", "dataset_infos.json")
    fill(tmp_path, ".gitattributes", ".cache/huggingface/x", "README_zh.md", "notice.txt")
    fill(tmp_path, "README.md", content=CARD)
    fill(tmp_path, "assets/a.png", content=POINTER)
    fill(tmp_path, "load.py", content="class A(datasets.GeneratorBasedBuilder): ...")
    assert read(tmp_path) == [train]
    assert read(tmp_path, TO_EVALUATE) == read(tmp_path, "test") == [test]
    assert read(tmp_path, "all") == [test, train]
    files = find_files(str(tmp_path))
    assert files.split_text == "split train (not read: test)"
    assert files.left_out == (
        "CITATION.cff, LICENSE, README.md (data card), README_zh.md, dataset_infos.json, load.py "
        "(loading script), 1 more such files, 1 .png, 1 dot file, 1 dot folder"
    )
    text = glance(DataConfig(path=str(tmp_path))).text
    assert "'one line'; split train (not read: test); left out: CITATION" in text
    with pytest.raises(ConfigError, match=r"data.split is 'dev', but .* holds the splits train,"):
        read(tmp_path, "dev")
    # A file that was not fetched is ignored.
    fill(tmp_path, test, content=POINTER)
    assert read(tmp_path) == [train]
    with pytest.raises(ConfigError, match=r"test-00000.*\.jsonl, which is a git-lfs pointer"):
        read(tmp_path, "test")


def test_chats_beside_a_data_card_are_chats(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", content=lines([{"messages": TURNS}]))
    fill(tmp_path, "README.md", content="About.")
    fill(tmp_path, "LICENSE", content="Free.")
    assert len(documents(tmp_path)) == 1
    assert find_files(str(tmp_path)).left_out == "LICENSE, README.md"


def test_a_readme_among_texts_is_a_text_unless_it_is_a_card(tmp_path: Path) -> None:
    names = ("LICENSE", "README.md", "a.md", "train.py", "test.py")
    fill(tmp_path, *names, content="# Text\n")
    assert read(tmp_path) == [*names[:3], "test.py", "train.py"]
    fill(tmp_path, "README.md", content="---\ntitle: Notes\ntags: [a]\n---\n")
    assert "README.md" in read(tmp_path)
    fill(tmp_path, "README.md", content="---\nlicense: mit\nlanguage: en\n---\n")
    assert "README.md" not in read(tmp_path)
    assert find_files(str(tmp_path)).left_out == "README.md (data card)"
    alone = fill(tmp_path / "one", "README.md", content="# Text\n")
    assert documents(alone / "README.md") == ["# Text\n"]


def test_token_ids_lie_beside_a_card(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", 8192, [([1, 2, 3], True)])
    fill(tmp_path, "README.md", "LICENSE", ".gitattributes", content=CARD)
    files = find_files(str(tmp_path))
    assert files.pairs == (tmp_path / "a",)
    assert files.left_out == "LICENSE, README.md (data card), 1 dot file"
    assert "left out: LICENSE" in glance(DataConfig(path=str(tmp_path))).text
    for suffix in ("bin", "idx"):
        fill(tmp_path, f"a.{suffix}", content=POINTER)
    for path in (tmp_path, tmp_path / "a"):
        with pytest.raises(ConfigError, match=r"a\.bin and 1 more of its kind is a git-lfs pointe"):
            find_files(str(path))


@pytest.mark.parametrize(("names", "expected"), TABLES["splits"])
def test_splits_by_name(names: list[str], expected: dict[str, int]) -> None:
    splits = splits_of(names, [], names, records=True).names
    assert {label: len(files) for label, files in splits.items()} == expected


def test_texts_have_splits_only_beside_train(tmp_path: Path) -> None:
    fill(tmp_path, "wiki.test.raw", "wiki.valid.raw", "other.txt", "LICENSE.txt")
    assert read(tmp_path) == ["other.txt", "wiki.test.raw", "wiki.valid.raw"]
    fill(tmp_path, "wiki.train.raw")
    assert read(tmp_path) == ["wiki.train.raw"]
    assert find_files(str(tmp_path)).left_out == "LICENSE.txt, other.txt (in no split)"


def test_where_several_splits_could_be_meant_they_are_named(tmp_path: Path) -> None:
    shards = ("train_gen", "train_sft", "test_sft")
    fill(tmp_path, *(f"{name}-00000-of-00001.jsonl" for name in shards))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    assert caught.value.problems == [
        f"data.path: {tmp_path} holds the splits train_gen, train_sft, test_sft: name one, as in "
        "data.split=train_gen, or data.split=all"
    ]
    assert read(tmp_path, "train_gen") == ["train_gen-00000-of-00001.jsonl"]
    splits, chosen = splits_in(str(tmp_path), None, "train_sft")
    assert splits.held_out(chosen) == ["test_sft"]
    assert len(read(tmp_path, "all")) == 3
    held_out = fill(tmp_path / "held_out", "dev.jsonl", "test.jsonl")
    with pytest.raises(ConfigError, match="holds the splits validation, test, and no train: name"):
        read(held_out)
    assert read(held_out, TO_EVALUATE) == ["dev.jsonl"]
    (held_out / "dev.jsonl").unlink()
    assert read(held_out) == ["test.jsonl"]
    assert find_files(str(held_out)).split_text == "split test"
    for path, message in ((held_out / "test.jsonl", "has no"), (tmp_path / "held_out", "holds")):
        with pytest.raises(ConfigError, match=f"data.split is 'x', but {path} {message} "):
            find_files(str(path), split="x")


def test_a_card_with_subsets(tmp_path: Path) -> None:
    fill(tmp_path, "main/a.jsonl", "main/held/b.jsonl", "small/a.jsonl", "small/c.jsonl")
    fill(tmp_path, "README.md", content=TWO_SUBSETS)
    with pytest.raises(ConfigError, match=r"holds the splits main/train, main/test, small/train: "):
        read(tmp_path)
    assert read(tmp_path, "main/train") == read(tmp_path, "main") == ["main/a.jsonl"]
    assert read(tmp_path, "small") == ["small/a.jsonl"]
    assert "small/c.jsonl" not in find_files(str(tmp_path), split="small").left_out
    assert "c.jsonl (in no split)" in find_files(str(tmp_path), split="small").left_out
    splits, chosen = splits_in(str(tmp_path), None, "main")
    assert splits.held_out(chosen) == ["main/test"]
    fill(tmp_path, "README.md", content=TWO_SUBSETS.replace("main\n", "main\n    default: true\n"))
    assert read(tmp_path) == read(tmp_path, "train") == ["main/a.jsonl"]


@pytest.mark.parametrize("configs", TABLES["cards"])
def test_cards_are_written_in_many_ways(tmp_path: Path, configs: str) -> None:
    fill(tmp_path, "README.md", content=f"---\n# x\n{configs}\nlicense: mit\n---\n")
    (subset,) = subsets_of(tmp_path / "README.md")
    assert (subset.name, subset.patterns) == ("a", {"train": ["data/*.jsonl"]})


@pytest.mark.parametrize("text", TABLES["others"])
def test_other_cards_name_no_files(tmp_path: Path, text: str) -> None:
    fill(tmp_path, "README.md", content=text)
    assert subsets_of(tmp_path / "README.md") == []
    assert is_card(tmp_path / "README.md") == ("configs" in text)


def test_evaluation_takes_train_where_no_split_is_held_out() -> None:
    assert _best(["train", "extra"], ("validation", "test")) == "train"


def test_patterns_name_files_and_folders() -> None:
    for is_match, patterns in ((True, TABLES["matching"]), (False, TABLES["not_matching"])):
        for pattern in patterns:
            assert matches("data/train-0.jsonl", pattern) == is_match, pattern
    assert not matches("a" * 60, "*a" * 30 + "b")  # immediately


@pytest.mark.parametrize(
    "configs",
    [
        "\n".join(" " * indent + "a:" for indent in range(1, 700)),
        f"- {'- ' * 3000}a",
        f"- a: {'[' * 3000}{']' * 3000}",
        f"- a: [{'{' * 100_000}]",
        f"- a{' ' * 100_000}b",
        f'- a: b{" #" * 100_000}"',
    ],
)
def test_a_card_of_any_text_is_read_at_once(tmp_path: Path, configs: str) -> None:
    fill(tmp_path, "README.md", content=f"---\nconfigs:\n{configs}\n---\n")
    assert is_card(tmp_path / "README.md")
    assert subsets_of(tmp_path / "README.md") == []


def test_a_card_that_is_too_long_does_not_mix_its_subsets(tmp_path: Path) -> None:
    fill(tmp_path, "a/a.jsonl", "b/b.jsonl", "README.md")
    subsets = "".join(f"- config_name: a{n}\n  data_files: a/a.jsonl\n" for n in range(8000))
    fill(tmp_path, "README.md", content=f"---\nconfigs:\n{subsets}---\n")
    with pytest.raises(ConfigError, match=r"data.path: .*README.md names .* set data.split=all"):
        read(tmp_path)
    assert read(tmp_path, "all") == ["a/a.jsonl", "b/b.jsonl"]


def plan_of(*words: str) -> Plan:
    return make_plan(load_run_config(None, words), {}, World(), here=True)


def test_held_out_splits_evaluate_unless_the_user_says(tmp_path: Path) -> None:
    fill(tmp_path, "train.jsonl", "dev.jsonl", "test.jsonl")
    path = f"data.path={tmp_path}"
    plan = plan_of(path)
    sets = [(name, it.path, it.split) for name, it in plan.config.data.eval_path.items()]
    assert sets == [(name, str(tmp_path), name) for name in ("validation", "test")]
    (message,) = (event["message"] for event in plan.events if event["kind"] == "eval_splits")
    assert "train is trained on, validation and test evaluate (data.eval_path)" in message
    train = f"data.path={tmp_path / 'train.jsonl'}"
    for words in ([path, "data.held_out=0.1"], [path, "data.split=all"], [train]):
        assert plan_of(*words).config.data.eval_path == {}
    other = plan_of(path, f"data.eval_path={tmp_path / 'dev.jsonl'}").config.data.eval_path
    assert [*other] == [""]
    mixed = plan_of(f'data.mix=[{{path="{tmp_path}", split="test"}}]').config.data
    assert mixed.eval_path == {}
    assert glance(mixed.sources()[tmp_path.name]).text.endswith("(not read: train, validation)")
