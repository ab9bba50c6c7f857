"""clean_data.py removes what it should, counts as datatrove does, and survives kills."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.data import shards
from harness.data.corpus import find_corpus
from harness.errors import ExitCode
from tests.browser import Browser, needs_browser
from tests.run_tools import printed
from tools.clean_data import main
from tools.proofs.cleaning.tables import recall
from tools.tokenize_data import main as tokenize

pytest.importorskip("datatrove", reason="needs datatrove: pip install datatrove")

NOUNS = "river engine garden letter market window forest teacher bridge kitchen".split()  # noqa: SIM905
VERBS = "carries follows watches builds remembers crosses paints answers opens".split()  # noqa: SIM905
PLACES = [
    "in the old town",
    "behind the house",
    "with great care",
    "of the valley",
    "that have gone",
]
SECRETS = [
    *("jane.doe+news@mail.example-corp.co.uk", "x_1@sub.domain.org"),
    *("8.8.8.8", "203.1.113.77", "2606:4700:4700::1111"),
    *("+49 30 1234567", "0049 (30) 123 4567", "(212) 555-0187", "212.555.0134", "+1-202-555-0199"),
]


def prose(seed: int, sentences: int = 14) -> str:
    draw = random.Random(seed)
    return " ".join(
        f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)} "
        f"{draw.choice(PLACES)} and {draw.choice(NOUNS)} {draw.randrange(100)}."
        for _ in range(sentences)
    )


def corpus(folder: Path) -> Path:
    """Prose, exact and near duplicates of some, lists of symbols, and personal data."""
    texts = [{"text": prose(seed), "id_here": seed} for seed in range(90)]
    texts += [{"text": prose(seed), "id_here": 1000 + seed} for seed in range(25)]  # exact
    for seed in range(30, 45):  # near: one word of about 150
        words = prose(seed).split()
        words[70] = "another"
        texts.append({"text": " ".join(words), "id_here": 2000 + seed})
    texts += [{"text": f"# {seed} ### ... -- {{}} == ;;" * 9, "id_here": seed} for seed in range(9)]
    texts += [
        {"text": f"{prose(500 + n)} Write to {secret} today. {prose(600 + n)}", "id_here": 3000 + n}
        for n, secret in enumerate(SECRETS)
    ]
    random.Random(0).shuffle(texts)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module", autouse=True)
def _small_shards() -> Any:
    patch = pytest.MonkeyPatch()
    whole = shards.shards_of
    patch.setattr(shards, "shards_of", lambda corpus, _=0: whole(corpus, 20_000))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(corpus, output) of the light recipe."""
    folder = tmp_path_factory.mktemp("clean")
    path = corpus(folder)
    assert main([str(path), str(folder / "out"), "--workers=2"]) == ExitCode.DONE
    return path, folder / "out"


def records(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for part in ("data", "removed")
        for path in sorted((folder / part).rglob("*.jsonl"))
    }


def test_duplicates_and_symbols_are_gone(cleaned: tuple[Path, Path]) -> None:
    left = {record["metadata"]["id_here"] for record in records(cleaned[1] / "data")}
    for seed in range(25):
        assert len(left & {seed, 1000 + seed}) == 1
    for seed in range(30, 45):
        assert len(left & {seed, 2000 + seed}) == 1
    assert left >= {*range(45, 90), *range(3000, 3000 + len(SECRETS))}
    removed = records(cleaned[1] / "removed" / "gopher_quality")
    assert len(removed) == 9
    assert all(record["metadata"]["filter_reason"] for record in removed)


def test_personal_data_is_replaced(cleaned: tuple[Path, Path]) -> None:
    text = (cleaned[1] / "data").glob("*.jsonl")
    whole = "".join(file.read_text() for file in text)
    assert [secret for secret in SECRETS if secret in whole] == []
    assert len(re.findall("Write to ", whole)) == len(SECRETS)
    report = json.loads((cleaned[1] / "report.json").read_text())
    assert report["steps"][-1]["reasons"] == {"emails": 2, "ips": 3, "phones": 5}


def test_the_report_counts_what_is_there(cleaned: tuple[Path, Path]) -> None:
    path, out = cleaned
    report = json.loads((out / "report.json").read_text())
    assert report["documents"]["read"] == len(path.read_text().splitlines())
    assert report["documents"]["written"] == len(records(out / "data"))
    for step in report["steps"]:
        folder = out / "removed" / step["step"]
        assert len(records(folder)) == step.get("changed", step["removed"])
        assert len(step["examples"]) == min(20, len(records(folder)))
    removed = sum(step["removed"] for step in report["steps"])
    assert report["documents"]["read"] - removed == report["documents"]["written"]
    sizes = [point["characters"] for point in report["strictness"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    left = [point["documents"] for point in report["after_steps"]]
    assert (left[0], left[-1]) == (report["documents"]["read"], report["documents"]["written"])


def test_bare_datatrove_removes_the_same(cleaned: tuple[Path, Path]) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.filters import GopherQualityFilter

    from tools.cleaning.recipe import read_recipe
    from tools.cleaning.words import RegexWords

    path, out = cleaned
    gopher = read_recipe("light", []).gopher_quality
    assert gopher is not None
    bare = GopherQualityFilter(language=RegexWords(), **dict(gopher))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    kept = [document.text for document in bare.run(Document(text, "") for text in texts)]
    by_tool = [record["text"] for record in records(out / "removed" / "gopher_quality")]
    assert sorted(by_tool) == sorted(set(texts) - set(kept))
    (step,) = [
        step
        for step in json.loads((out / "report.json").read_text())["steps"]
        if step["step"] == "gopher_quality"
    ]
    of_datatrove = json.loads(bare.stats.to_json())["stats"]
    assert (step["read"], step["removed"]) == (of_datatrove["total"], of_datatrove["dropped"])
    assert step["reasons"] == {
        key.removeprefix("dropped_"): count
        for key, count in of_datatrove.items()
        if key.startswith("dropped_")
    }


@pytest.mark.gate("data")
def test_killed_at_any_point_it_ends_with_the_same_bytes(
    cleaned: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ends = []
    ways = ((1, signal.SIGKILL), (6, signal.SIGINT), (14, signal.SIGTERM), (30, signal.SIGKILL))
    for count, number in ways:
        child = os.fork()
        if not child:
            os._exit(main([str(cleaned[0]), str(out), "--workers=2"]))
        ended, deadline = 0, time.monotonic() + 300
        while not ended and len([*out.glob("logs/*/completions/*")]) < count:
            ended, code = os.waitpid(child, os.WNOHANG)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if not ended:
            os.kill(child, number)
            _, code = os.waitpid(child, 0)
        ends.append(os.waitstatus_to_exitcode(code))
    assert ends[0] == -signal.SIGKILL
    assert {*ends[1:3]} <= {ExitCode.STOPPED, ExitCode.DONE}  # it may have ended meanwhile
    assert ExitCode.STOPPED in ends[1:3]
    assert main([str(cleaned[0]), str(out), "--workers=2"]) == ExitCode.DONE
    assert tree(out) == tree(cleaned[1])
    ours, undisturbed = (
        json.loads((folder / "report.json").read_text()) for folder in (out, cleaned[1])
    )
    for key in ("documents", "characters", "after_steps", "strictness"):
        assert ours[key] == undisturbed[key]


@pytest.mark.gate("data")
def test_the_cleaned_text_is_tokenised_straight_after_and_goes_on(
    cleaned: tuple[Path, Path],
    tmp_path: Path,
    tokenizer_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed among the shards, and again while they are joined."""
    path, out = cleaned
    plain = tmp_path / "plain"
    words = [f"data.path={out / 'data'}", f"data.tokenizer={tokenizer_dir}", f"--out={plain}"]
    assert tokenize(words) == ExitCode.DONE
    asked = [str(path), str(out), "--workers=1", f"--tokenizer={tokenizer_dir}"]

    def killed_at(name: str) -> None:
        whole, count = getattr(shards, name), 0

        def dying(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count > 1 or name == "join_indexed":
                os.killpg(0, signal.SIGKILL)
            return whole(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(shards, name, dying)
            child = os.fork()
            if not child:
                os.setpgid(0, 0)
                os._exit(main(asked))
            _, code = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(code) == -signal.SIGKILL
        assert not (out / "tokens.idx").exists()

    killed_at("encode_corpus")
    finished = [path for path in out.glob("tokens.*-shards/*") if path.name.isdigit()]
    assert [path.name for path in finished] == ["00000"]
    killed_at("join_indexed")
    assert len(shards.shards_of(find_corpus(str(out / "data")))) > 2
    assert main(asked) == ExitCode.DONE
    for suffix in (".bin", ".idx"):
        assert (out / f"tokens{suffix}").read_bytes() == Path(f"{plain}{suffix}").read_bytes()
    written = json.loads((out / "report.json").read_text())["documents"]["written"]
    assert f"tokens.bin and .idx: {written} documents" in capsys.readouterr().out
    assert main([*asked, "--json"]) == ExitCode.DONE  # nothing left to do
    assert json.loads(capsys.readouterr().out)["documents"]["written"] == written
    assert not [*out.glob("tokens.*shards*")]


@pytest.mark.gate("data")
def test_what_is_planted_is_found(tmp_path: Path) -> None:
    """The proof of docs/cleaning_proof.md on a small corpus: each row of it must hold."""
    rows = recall(tmp_path / "recall", duplicates=60, of_a_kind=25).splitlines()[4:]
    assert [row.split("|")[1].split()[0] for row in rows] == [
        *("equal", "near", "email:", "IP:", "phone:")
    ]
    assert all(row.endswith("| yes |") for row in rows), "\n".join(rows)


def test_a_tokenizer_is_looked_at_before_the_text(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(write_jsonl({"text": "a"})), str(tmp_path / "out"), f"--tokenizer={tmp_path}/lost"]
    assert main(words) == ExitCode.BAD_CONFIG
    assert f"{tmp_path}/lost': there is no such folder" in capsys.readouterr().err
    assert main([*words, "--slurm"]) == ExitCode.BAD_CONFIG
    assert "slurm/tokenize.sbatch data.path=" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.gate("data")
def test_tasks_that_keep_nothing_shift_no_numbers(tmp_path: Path) -> None:
    """The second of three shards has symbols alone, and the third duplicates of the first."""
    texts = [prose(n) for n in range(30)]
    symbols = [f"# {n} ### ... -- {{}} == ;; {'#;' * 40}" for n in range(300)]
    path = tmp_path / "corpus.jsonl"
    records_of = [{"text": text} for text in (*texts, *symbols, *texts[:20])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records_of))
    assert len(shards.shards_of(find_corpus(str(path)))) >= 3
    assert main([str(path), str(tmp_path / "out")]) == ExitCode.DONE
    assert sorted(of["text"] for of in records(tmp_path / "out" / "data")) == sorted(texts)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in symbols))
    assert main([str(path), str(tmp_path / "nothing")]) == ExitCode.DONE
    report = json.loads((tmp_path / "nothing" / "report.json").read_text())
    assert report["documents"] == {"read": 300, "empty": 0, "written": 0}


@pytest.mark.gate("data")
def test_evaluation_data_bad_words_languages_and_addresses_are_removed(
    tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    question = "Which old bridge crosses the widest river of the valley behind the town today?"
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": question, "completion": " None."}))
    (tmp_path / "words.txt").write_text("dreadful phrase\n")
    german = (
        "Der Lehrer geht mit einem Brief durch den alten Garten und erinnert sich an alles. " * 9
    )
    path = write_jsonl(
        {"text": prose(1), "url": "https://example.org/page"},
        {"text": f"{prose(2)} {question} {prose(3)}"},
        {"text": f"{prose(4)} A Dreadful phrase. {prose(5)}"},
        {"text": german},
        {"text": prose(6), "url": "https://bad.example.com/page"},
        {"text": "def f():\n    return {1: 2}\n" * 30},
    )
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'base = "light"\nnear_duplicates = false\n[decontaminate]\n'
        f'files = ["{tmp_path}/eval.jsonl"]\n[url]\nextra_domains = ["bad.example.com"]\n'
        f'[bad_words]\nfile = "{tmp_path}/words.txt"\n[language]\nthreshold = 0.4\n'
    )
    out = tmp_path / "out"
    words = [str(path), str(out), "--recipe", str(recipe), "c4.filter_no_terminal_punct=false"]
    assert main([*words, "c4.min_num_sentences=1"]) == ExitCode.DONE
    removed = {
        step["step"]: step["removed"]
        for step in json.loads((out / "report.json").read_text())["steps"]
    }
    assert removed["url"] == removed["bad_words"] == removed["decontaminate"] == 1
    assert removed["language"] + removed["c4"] == 2
    assert [record["metadata"]["language"] for record in records(out / "data")] == ["en"]


def test_all_problems_come_at_once(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *(str(tmp_path / "lost"), str(tmp_path / "out"), "--recipe=fineweb", "--workers=0"),
        *("language.treshold=0.5", "gopher_quality.min_doc_words=-1", "bad_words.file=no.txt"),
        "decontaminate={}",
    ]
    assert main(words) == ExitCode.BAD_CONFIG
    report = capsys.readouterr().err
    for part in (
        "language.treshold (command line) is not a key of a recipe; did you mean language.thre",
        "gopher_quality.min_doc_words is -1 (command line)",
        "decontaminate.files is missing",
        "--workers is 0",
        "IN: ",
    ):
        assert part in report
    chats = write_jsonl({"question": "a", "answer": "b"})
    assert main([str(chats), str(tmp_path / "out")]) == ExitCode.BAD_CONFIG
    assert "holds conversations" in capsys.readouterr().err
    assert main([str(chats), str(tmp_path / "out"), "--recipe=no.toml"]) == ExitCode.BAD_CONFIG
    assert "the recipes are fineweb, light" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    lines = [json.dumps({"text": prose(n)}) for n in range(120)]
    lines[5], lines[110] = "{", json.dumps({"text": 5})
    bad.write_text("\n".join(lines))
    assert main([str(bad), str(tmp_path / "bad-out")]) == ExitCode.BAD_CONFIG
    report = capsys.readouterr().err
    assert not (tmp_path / "bad-out").exists()
    assert "bad.jsonl:6: is no JSON" in report
    assert "bad.jsonl:111: text must be a string" in report


def test_another_cleaning_is_not_mixed_in(
    cleaned: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = map(str, cleaned)
    assert main([path, out]) == ExitCode.DONE  # nothing left to do
    capsys.readouterr()
    assert main([path, out, "personal_data=false"]) == ExitCode.BAD_CONFIG
    assert "holds a cleaning with another recipe" in capsys.readouterr().err
    assert main([path, str(Path(path).parent)]) == ExitCode.BAD_CONFIG
    assert "which is not of this tool" in capsys.readouterr().err


def test_other_evaluation_data_or_words_are_another_cleaning(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_jsonl({"text": prose(1)}, {"text": prose(2)}), tmp_path / "out"
    evaluation, words = tmp_path / "eval.txt", tmp_path / "words.txt"
    evaluation.write_text(prose(2))
    words.write_text("# none\n\n")
    asked = [str(path), str(out), "near_duplicates=false", f"bad_words.file={words}"]
    asked.append(f'decontaminate.files=["{evaluation}"]')
    assert main(asked) == ExitCode.BAD_CONFIG
    assert f"{words} holds no word" in capsys.readouterr().err
    words.write_text("dreadful\n")
    assert main([*asked, "--keep-work"]) == ExitCode.DONE
    assert [of["text"] for of in records(out / "data")] == [prose(1)]
    index = {path: path.stat().st_mtime_ns for path in (out / "work" / "n-grams").iterdir()}
    assert main([*asked, "--keep-work"]) == ExitCode.DONE
    assert {path: path.stat().st_mtime_ns for path in index} == index  # jobs may be reading it
    evaluation.write_text(prose(3))
    words.write_text("another\n")
    assert main(asked) == ExitCode.BAD_CONFIG
    assert "another evaluation data, list of words" in capsys.readouterr().err


@needs_browser
def test_the_page_shows_it(cleaned: tuple[Path, Path]) -> None:
    with Browser() as browser:
        for width in (1280, 390):
            page = browser.open((cleaned[1] / "report.html").as_uri(), width=width)
            assert page.errors == []
            assert len(page.requests) == 1
            assert not page.overflows
        assert page.evaluate("document.querySelectorAll('figure.chart').length") == 2
        assert "near duplicates" in page.evaluate("document.body.textContent")


def test_help_and_refusals_need_no_torch_and_no_datatrove() -> None:
    code = (
        "import sys; from tools.clean_data import main; main(['a', 'b', '--workers=0'])\n"
        "print({'torch', 'transformers', 'datatrove'} & sys.modules.keys())"
    )
    assert printed(code).endswith("set()\n")


def test_a_folder_with_splits_is_cleaned_by_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": prose(1)}) + "\n")
    words = [str(folder), str(tmp_path / "out"), "--recipe=light", "--dry-run"]
    assert main(words) == ExitCode.DONE
    assert "split train (not read: test)" in capsys.readouterr().err
    assert main([*words, "--split=test"]) == ExitCode.DONE
    assert "split test (not read: train)" in capsys.readouterr().err
    assert main([*words, "--split=dev"]) == ExitCode.BAD_CONFIG
    assert "--split is 'dev', but" in capsys.readouterr().err
