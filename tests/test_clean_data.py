"""clean_data.py removes what it should, counts as datatrove does, and survives kills."""

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.data import shards
from harness.errors import ConfigError, ExitCode
from harness.files.corpus import find_corpus
from harness.launch.ranks import forked
from tests.real_runs import wait_for
from tests.tables import beside
from tools.clean_data import _tokenizer_problems, main
from tools.slurm_queue import queued
from tools.tokenize_data import main as tokenize

pytest.importorskip("datatrove", reason="needs datatrove: pip install datatrove")

import numpy as np
import pyarrow
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter
from datatrove.utils.text import ngrams, simplify_text
from pyarrow import parquet

from tools.cleaning import steps
from tools.cleaning.pipeline import Pipeline, _writer, keep_identity
from tools.cleaning.recipe import packaged_model, read_recipe
from tools.cleaning.stages import Local, cancel_never_satisfied, environment
from tools.cleaning.steps import RegexWords

NOUNS = "river engine garden letter market window forest teacher bridge kitchen".split()  # noqa: SIM905
VERBS = "carries follows watches builds remembers crosses paints answers opens".split()  # noqa: SIM905
PLACES = "in the old town,behind the house,with great care,of the valley,that have gone".split(",")  # noqa: SIM905
TABLES = beside(__file__, "clean_data.toml")
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
    """Write prose, exact and near duplicates of some, lists of symbols, and personal data."""
    texts = [{"text": prose(seed), "id_here": seed} for seed in range(90)]
    texts += [{"text": prose(seed), "id_here": 1000 + seed} for seed in range(25)]  # exact
    for seed in range(30, 45):  # near: one word in about 150
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
    """Return (corpus, output) of the light recipe."""
    folder = tmp_path_factory.mktemp("clean")
    path = corpus(folder)
    assert main([str(path), str(folder / "out"), "--workers=2"]) == ExitCode.DONE
    return path, folder / "out"


def records(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def test_the_report_has_the_steps_of_its_recipe(cleaned: tuple[Path, Path]) -> None:
    assert report(cleaned[1])["recipe"] == read_recipe("light", []).model_dump(exclude_none=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for part in ("data", "removed")
        for path in sorted((folder / part).rglob("*.jsonl"))
    }


def test_duplicates_and_symbols_are_gone(cleaned: tuple[Path, Path]) -> None:
    left = {record["metadata"]["id_here"] for record in records(cleaned[1] / "data")}
    pairs = [{seed, 1000 + seed} for seed in range(25)]
    pairs += [{seed, 2000 + seed} for seed in range(30, 45)]
    assert [len(left & pair) for pair in pairs] == [1] * 40
    assert left >= {*range(45, 90), *range(3000, 3000 + len(SECRETS))}
    removed = records(cleaned[1] / "removed" / "gopher_quality")
    assert len(removed) == 9
    assert all(record["metadata"]["filter_reason"] for record in removed)


def test_personal_data_is_replaced(cleaned: tuple[Path, Path]) -> None:
    whole = "".join(file.read_text() for file in (cleaned[1] / "data").glob("*.jsonl"))
    assert [secret for secret in SECRETS if secret in whole] == []
    assert len(re.findall("Write to ", whole)) == len(SECRETS)
    assert report(cleaned[1])["steps"][-1]["reasons"] == {"emails": 2, "ips": 3, "phones": 5}


def test_the_report_counts_what_is_there(cleaned: tuple[Path, Path]) -> None:
    path, out = cleaned
    whole, documents = report(out), report(out)["documents"]
    assert documents["read"] == len(path.read_text().splitlines())
    assert documents["written"] == len(records(out / "data"))
    for step in whole["steps"]:
        folder = out / "removed" / step["step"]
        assert len(records(folder)) == step.get("changed", step["removed"])
        assert len(step["examples"]) == min(20, len(records(folder)))
    removed = sum(step["removed"] for step in whole["steps"])
    assert documents["read"] - removed == documents["written"]
    sizes = [point["characters"] for point in whole["strictness"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    left = [point["documents"] for point in whole["after_steps"]]
    assert (left[0], left[-1]) == (documents["read"], documents["written"])
    assert " 15 removed   13.0%" in (out / "report.txt").read_text()  # of 115 documents


def passed_on(path: Path, text: str | None = None) -> list[dict[str, Any]]:
    """Return the metadata of documents that task 0 reads, writes, and reads in a later stage."""
    corpus = find_corpus(str(path), columns={"text": text} if text else None)
    reader = steps.CorpusReader(corpus, shards.shards_of(corpus), path.parent / "problems")
    folder = str(path.parent / "filtered")
    for _ in _writer(Path(folder)).run(reader.run()):
        pass
    return [document.metadata for document in steps.TaskReader(folder, add_file_path=False).run()]


@pytest.mark.parametrize(
    ("text", "columns", "changed"),
    [
        *TABLES["columns"],
        (None, {"n": 2**64, "s": ["\ud800"]}, {"n": "18446744073709551616", "s": ["\\ud800"]}),
    ],
)
def test_columns_beside_the_text_are_passed_on(
    text: str | None, columns: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({text or "text": body, **columns}) for body in (" ", "A text.")]
    path.write_text("\n".join(lines))
    (metadata,) = passed_on(path, text)
    expected = {**columns, **changed, "read_from": f"{path}:2"}
    assert metadata == {key: value for key, value in expected.items() if value != "gone"}


def test_the_detected_language_leaves_a_column_language_alone(tmp_path: Path) -> None:
    document = Document(f"{prose(1)}\n", "1", metadata={"language": "eng", "language_score": 0.5})
    step = steps.Language(["en"], 0.5, packaged_model(), _writer(tmp_path))
    assert step.filter(document) is True
    assert document.metadata.pop("detected_language_score") > 0.5
    assert document.metadata == {
        "language": "eng", "language_score": 0.5, "detected_language": "en"
    }  # fmt: skip


@pytest.mark.parametrize(("score", "is_kept"), [(0.7, True), (0.6, False)])
def test_language_needs_its_threshold(score: float, is_kept: bool, tmp_path, monkeypatch) -> None:
    model = mock.Mock()
    model.predict.return_value = (["__label__en", "__label__de"], [score, 0.1])
    monkeypatch.setattr(steps, "language_model", lambda path: model)
    step = steps.Language(["en"], 0.65, tmp_path, _writer(tmp_path))
    assert step.filter(Document("A text.", "1")) == (True if is_kept else (False, "en"))
    assert len([*step.run([Document("A text.", "1")])]) == is_kept


@pytest.mark.parametrize(("text", "only_public", "is_replaced"), TABLES["personal"])
def test_phones_and_addresses_have_bounds(
    text: str, only_public: bool, is_replaced: bool, tmp_path: Path
) -> None:
    document = Document(f"Write {text} down.", "1")
    step = steps.PersonalData(True, True, only_public, True, tmp_path)
    assert len(step.redact(document)) == is_replaced
    assert (text not in document.text) == is_replaced


def test_the_keys_of_a_recipe_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys"]) == ExitCode.DONE
    assert "near_duplicates.n_grams = " in capsys.readouterr().out


def test_c4_removes_documents_without_lines(tmp_path: Path) -> None:
    options = {"min_num_sentences": 0, "language": RegexWords()}
    document = Document("no end\n\nno end either", "1")
    assert steps.C4(_writer(tmp_path), **options).filter(document) == (False, "no_line_left")
    assert document.text == "no end\n\nno end either"


def test_n_grams_of_all_evaluation_documents_are_written(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in ("one two 三四", "four five six")]
    (tmp_path / "eval.jsonl").write_text("\n".join(lines))
    steps.write_n_grams([str(tmp_path / "eval.jsonl")], 2, "regex", tmp_path)
    (index,) = tmp_path.glob("*.index.hashes")
    assert len(np.fromfile(index, dtype="u8")) == 5


def test_whatever_changes_needs_another_folder(tmp_path: Path) -> None:
    (file := tmp_path / "eval.jsonl").write_text('{"text": "one two"}')
    words = [f'decontaminate.files=["{file}"]', f"bad_words.file={file}", f"language.model={file}"]
    corpus = mock.Mock(columns={}, **{"identity.return_value": []})
    (out := tmp_path / "out").mkdir()
    for _ in range(2):
        keep_identity(Pipeline(read_recipe("light", words), corpus, [], out, 1, frozenset()))
    file.write_text('{"text": "one two three"}')
    corpus = mock.Mock(columns={"text": "a"}, **{"identity.return_value": [1]})
    recipe = read_recipe("light", [*words, "c4=true"])
    with pytest.raises(ConfigError, match=TABLES["differs"]):
        keep_identity(Pipeline(recipe, corpus, [corpus], out, 1, frozenset()))


def test_stages_have_the_numbers_of_the_recipe(tmp_path: Path) -> None:
    numbers = {"n_grams": 3, "num_buckets": 7, "hashes_per_bucket": 5, "seed": 9}
    words = [f"near_duplicates.{key}={value}" for key, value in numbers.items()]
    words += ['decontaminate.files=["eval.jsonl"]', "decontaminate.n_grams=6"]
    (own := tmp_path / "own.toml").write_text(TABLES["own"])
    recipe = read_recipe(str(own), words)
    pipeline = Pipeline(recipe, mock.Mock(), [], tmp_path, 1, frozenset())
    stages = {stage.name: stage for stage in pipeline.stages()}
    for step in (stages["signatures"].steps[-1], stages["buckets"].steps[0]):
        assert {key: getattr(step.config, key) for key in numbers} == numbers
    assert stages["buckets"].tasks == numbers["num_buckets"]
    assert pipeline._filter("decontaminate").config.n_grams == 6
    quality = pipeline._filter("gopher_quality")
    assert (quality.min_doc_words, quality.max_avg_word_length) == (5, 15)


@pytest.mark.parametrize(("rank", "measured"), [(0, 3), (1, 2), (2, 0)])
def test_one_document_in_three_is_measured(rank: int, measured: int, tmp_path: Path) -> None:
    documents = [Document(TABLES["text"], str(n)) for n in range(7)]
    step = steps.Sample(tmp_path, 3, frozenset({0, 1}))
    assert [*step.run(iter(documents), rank)] == documents
    assert len(records(tmp_path)) == measured
    assert all(each["measures"] == pytest.approx(TABLES["measures"]) for each in records(tmp_path))


def test_an_address_that_is_no_text_is_no_address() -> None:
    document = Document("A text.", "1", metadata={"url": ["https://a.org"]})
    assert steps.Urls().filter(document) is True


def test_parquet_values_that_json_lacks_are_passed_on_as_text(tmp_path: Path) -> None:
    columns = {
        "text": ["A text."],
        "price": [Decimal("1.50")],
        "length": [timedelta(seconds=90)],
        "image": [{"bytes": b"\xff", "date": date(2026, 1, 2)}],
    }
    path = tmp_path / "corpus.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    (metadata,) = passed_on(path)
    image = {"bytes": None, "date": "2026-01-02"}
    kept = {"price": "1.50", "length": "0:01:30", "image": image}
    assert metadata == {**kept, "read_from": f"{path}:1"}


def test_bare_datatrove_removes_the_same(cleaned: tuple[Path, Path]) -> None:
    path, out = cleaned
    gopher = read_recipe("light", []).gopher_quality
    assert gopher is not None
    bare = GopherQualityFilter(language=RegexWords(), **dict(gopher))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    kept = [document.text for document in bare.run(Document(text, "") for text in texts)]
    by_tool = [record["text"] for record in records(out / "removed" / "gopher_quality")]
    assert sorted(by_tool) == sorted(set(texts) - set(kept))
    (step,) = [each for each in report(out)["steps"] if each["step"] == "gopher_quality"]
    of_datatrove = json.loads(bare.stats.to_json())["stats"]
    assert (step["read"], step["removed"]) == (of_datatrove["total"], of_datatrove["dropped"])
    assert step["reasons"] == {
        key.removeprefix("dropped_"): count
        for key, count in of_datatrove.items()
        if key.startswith("dropped_")
    }


@pytest.mark.gate("data")
def test_killed_anywhere_it_writes_the_same(cleaned: tuple[Path, Path], tmp_path: Path) -> None:
    out, whole = tmp_path / "out", Local._run_for_rank

    def slowly(local: Local, *task: Any, **how: Any) -> Any:  # so that it has not ended when killed
        time.sleep(0.3)
        return whole(local, *task, **how)

    def ended_tasks() -> int:
        return len([*out.glob("logs/*/completions/*")])

    ends = []
    for more, number in ((1, "KILL"), (1, "INT"), (2, "TERM"), (9, "KILL")):
        due = ended_tasks() + more
        with mock.patch.object(Local, "_run_for_rank", slowly):
            group = forked(lambda _: main([str(cleaned[0]), str(out), "--workers=2"]), 1)
        wait_for(lambda: group.ended or ended_tasks() >= due, "the time of its end", 300)  # noqa: B023
        group.processes[0].send_signal(signal.Signals[f"SIG{number}"])
        ends += group.wait().codes
    assert ends[:3] == [-signal.SIGKILL, ExitCode.STOPPED, ExitCode.STOPPED]
    assert main([str(cleaned[0]), str(out), "--workers=2"]) == ExitCode.DONE
    assert tree(out) == tree(cleaned[1])
    for key in ("documents", "characters", "after_steps", "strictness"):
        assert report(out)[key] == report(cleaned[1])[key]


@pytest.mark.gate("data")
def test_cleaned_text_is_tokenised_directly_and_resumes(
    cleaned: tuple[Path, Path],
    tmp_path: Path,
    tokenizer_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is killed during the shards, and again while they are joined."""
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
            (code,) = forked(lambda _: os.setpgid(0, 0) or main(asked), 1).wait().codes
        assert code == -signal.SIGKILL
        assert not (out / "tokens.idx").exists()

    killed_at("encode_corpus")
    finished = [path for path in out.glob("tokens.*-shards/*") if path.name.isdigit()]
    assert [path.name for path in finished] == ["00000"]
    killed_at("join_indexed")
    assert len(shards.shards_of(find_corpus(str(out / "data")))) > 2
    assert main(asked) == ExitCode.DONE
    for suffix in (".bin", ".idx"):
        assert (out / f"tokens{suffix}").read_bytes() == Path(f"{plain}{suffix}").read_bytes()
    written = report(out)["documents"]["written"]
    assert f"tokens.bin and .idx: {written} documents" in capsys.readouterr().out
    assert main([*asked, "--json"]) == ExitCode.DONE  # nothing left to do
    assert json.loads(capsys.readouterr().out)["documents"]["written"] == written
    assert not [*out.glob("tokens.*shards*")]


@pytest.mark.gate("data")
def test_near_duplicates_start_at_the_similarity_threshold(tmp_path: Path) -> None:
    """Of 60 pairs with a Jaccard similarity of 0.8, 97.5 % are expected (docs/cleaning.md)."""
    originals = [prose(seed) for seed in range(1000, 1060)]
    texts = originals + [near_duplicate(seed, text) for seed, text in enumerate(originals)]
    path = tmp_path / "planted.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main([str(path), str(tmp_path / "out"), "gopher_quality=false"]) == ExitCode.DONE
    assert 57 <= len(records(tmp_path / "out" / "removed" / "near_duplicates")) <= 60


def near_duplicate(seed: int, text: str) -> str:
    """Return a text with words replaced until its similarity is just above 0.8."""
    draw, words, near = random.Random(seed), text.split(), text
    while jaccard(text, " ".join(words)) >= 0.8:
        near = " ".join(words)
        words[draw.randrange(len(words))] = draw.choice(NOUNS)
    return near


def jaccard(one: str, two: str) -> float:
    cut = RegexWords().word_tokenize
    a, b = (set(ngrams(cut(simplify_text(text)), 5)) for text in (one, two))
    return len(a & b) / len(a | b)


def test_folders_with_spaces_are_quoted_for_slurm(tmp_path: Path) -> None:
    """And what site.env's last line returns does not matter."""
    clone, folder = tmp_path / "a clone", tmp_path / "the data"
    (clone / "slurm").mkdir(parents=True)
    folder.mkdir()
    (clone / "slurm/site.env").write_text("SITE=ours\n[[ -d /nowhere ]]\n")
    command = f'{environment(clone, folder)}; echo "$PWD, $SITE, $PYTHONPATH"'
    before = {**os.environ, "PYTHONPATH": "before"}
    done = subprocess.run(["bash", "-c", command], env=before, capture_output=True, text=True)
    assert done.stdout == f"{folder}, ours, {clone}:before\n", done.stderr
    args = argparse.Namespace(tokenizer="my tokenizer", slurm=True, output=folder)
    (problem,) = _tokenizer_problems(args)
    assert shlex.split(problem)[-2:] == [f"data.path={folder}/data", "data.tokenizer=my tokenizer"]


def test_jobs_after_failures_are_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = "echo '7_3 None'; echo '8_[0-4] DependencyNeverSatisfied'; echo '9_1 Priority'"
    for name, lines in (("squeue", squeue), ("scancel", f'echo "$@" > {tmp_path}/cancelled')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cancel_never_satisfied(queued(["7", "8", "9"])) == ["7_3", "9_1"]
    assert (tmp_path / "cancelled").read_text() == "8\n"
    for error, left in (("timed out", ["7", "8"]), ("Invalid job id specified", [])):
        (tmp_path / "squeue").write_text(f"#!/bin/bash\necho {error} >&2\nexit 1\n")
        assert [*queued(["7", "8"])] == left
