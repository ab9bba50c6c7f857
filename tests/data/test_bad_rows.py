"""data.bad_rows=skip: unreadable records are skipped, counted and listed."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.data_section import DataConfig
from harness.data.prepare import SKIPPED
from harness.errors import ConfigError
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.plan.data import balanced
from tests.data.conftest import Opened, Refused
from tests.data.glancing import glance
from tests.data.test_chats import BOT, USER
from tests.files.test_contents import as_parquet
from tests.report.runs import write_run

SKIPS = {"bad_rows": "skip", "bad_rows_limit": 0.2}
TEXT = "the model reads a text and learns which word follows another"


def record(number: int) -> dict[str, Any]:
    return {"text": f"{TEXT} {number}", "l": "de" if number % 2 else "en"}


def as_lines(records: list[Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def spoilt_lines(path: Path) -> Path:
    """Write forty records, five of which are unreadable in three ways."""
    lines = as_lines([record(number) for number in range(40)])
    lines[3] = '{"text": null, "l": "en"}'
    lines[7] = lines[8] = '{"text": "an emoji \\ud83d"}'
    lines[11] = lines[11].replace("model", "m\udc9adel")  # a byte that is not UTF-8
    lines[39] = lines[39][:20]
    path.write_text("\n".join(lines), errors="surrogateescape")
    return path


def test_bad_lines_are_skipped_and_named(opened: Opened, refused: Refused, tmp_path: Path) -> None:
    path = spoilt_lines(tmp_path / "a.jsonl")
    problems = refused(path)
    assert len(problems) == 4
    assert problems[-1].endswith("; data.bad_rows=skip leaves out such rows and counts them")
    for _ in range(2):  # the second from the cache
        data = opened(path, **SKIPS)
        assert data.documents == 35
        (line,) = data.summary()
        assert "; bad rows left out: 5 of 40 (12.5%): contains half of a c" in line
        assert f"(2, the first {path}:8); text must be a string, not NoneType ({path}:4); " in line
        (event,) = (event for event in data.events() if event["kind"] == "bad_rows")
        assert (event["skipped"], event["rows"]) == (5, 40)
        assert [(kind["rows"], kind["first"]) for kind in event["kinds"]] == [
            *((1, f"{path}:4"), (2, f"{path}:8"), (1, f"{path}:12"), (1, f"{path}:40"))
        ]
    assert "bad rows among the first, to be left out: 5 of 40" in (
        glance(DataConfig(path=str(path), **SKIPS)).text
    )
    for limits in ({}, {"bad_rows": "skip"}):
        with pytest.raises(ConfigError) as caught:
            glance(DataConfig(path=str(path), **limits))
        assert caught.value.problems == refused(path, **limits)


def test_too_many_bad_rows_reject_the_run(opened: Opened, refused: Refused, tmp_path: Path) -> None:
    path = spoilt_lines(tmp_path / "a.jsonl")
    options = {"bad_rows": "skip"}
    first, *others = refused(path, **options)
    assert first == (
        "data.bad_rows_limit is 0.1, but 5 of 40 (12.5%) rows are bad: fix them, or raise it; "
        "the first of each kind:"
    )
    assert [text.split(": ")[1] for text in others] == [f"{path}:{n}" for n in (4, 8, 12, 40)]
    for limit in (0.125, 5):
        assert opened(path, **options, bad_rows_limit=limit).documents == 35
    # Cached data is checked against the limit of each start.
    assert "data.bad_rows_limit is 4, but 5 of" in refused(path, **options, bad_rows_limit=4)[0]
    (skipped,) = tmp_path.glob(f"cache/*/{SKIPPED}")
    skipped.write_text("[]")
    assert "cannot be read" in refused(path, **options, bad_rows_limit=5)[0]
    path.write_text("{}\n" * 120 + "\n".join(as_lines([record(n) for n in range(1500)])))
    assert "to be left out: 120 of 1,000" in glance(DataConfig(path=str(path), **options)).text


def test_a_corpus_of_bad_rows_alone_is_not_left_out(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(as_lines([{"txt": TEXT}] * 40)))
    (problem,) = refused(tmp_path / "a.jsonl")
    assert "(40 of 40 lines read; this is the first)" in problem
    assert "data.bad_rows" not in problem


def test_blank_texts_are_bad_rows_where_those_are_left_out(opened: Opened, tmp_path: Path) -> None:
    lines = as_lines([record(number) for number in range(40)])
    lines[1:3] = ['{"text": ""}', '{"text": " \\n"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    assert "2 blank texts (only their end is learned)" in opened(path).summary()[0]
    data = opened(path, bad_rows="skip")
    assert data.documents == 38
    text = f"2 of 40 (5.0%): is blank: nothing to learn (2, the first {path}:2)"
    assert text in data.summary()[0]
    assert text in glance(DataConfig(path=str(path), bad_rows="skip")).text


def test_data_without_bad_rows_is_the_same(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(as_lines([record(number) for number in range(40)])))
    plain, skipping = (opened(path, bad_rows=how) for how in ("refuse", "skip"))
    assert plain.fingerprint == skipping.fingerprint
    assert plain.summary() == skipping.summary()
    assert not [event for event in skipping.events() if event["kind"] == "bad_rows"]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.json", "chats.jsonl"])
def test_any_format_skips_rows(opened: Opened, tmp_path: Path, chatml_dir: str, name: str) -> None:
    path, records = tmp_path / name, [record(number) for number in range(40)]
    if name == "a.csv":
        rows = [f'"{record["text"]}";{record["l"]}' for record in records]
        rows[2], rows[5], rows[6] = "one column", '"a"b;c', "caf\udce9;en"
        path.write_text("\n".join(["text;l", *rows]) + "\n", errors="surrogateescape")
        lines = (4, 7, 8)
    elif name == "chats.jsonl":
        chats: list[Any] = [
            {"messages": [USER, {**BOT, "content": record["text"]}]} for record in records
        ]
        chats[4]["messages"][1]["content"] = ""
        chats[5] = {"text": "no chat"}
        chats[6]["messages"].pop()
        path.write_text("\n".join(as_lines(chats)))
        lines = (5, 6, 7)
    else:
        for number in (1, 4, 9):
            records[number]["text"] = None
        is_table = name == "a.parquet"
        path.write_bytes(as_parquet(records) if is_table else json.dumps(records).encode())
        lines = (2,)
    data = opened(path, tokenizer=chatml_dir, bad_rows="skip")
    assert data.documents == 37
    (event,) = (event for event in data.events() if event["kind"] == "bad_rows")
    assert (event["skipped"], event["rows"]) == (3, 40)
    assert {kind["first"] for kind in event["kinds"]} == {f"{path}:{line}" for line in lines}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'text\nfine\n"open\nlost\nlost too\n', "nothing closes the quote of line 3"),
        ("a.json", b'[{"text": "a"}, {"text": "b"', "it is not one complete JSON array"),
        ("a.txt", b"fine\n" * 1000 + b"\xff", "codec can't decode"),
    ],
)
def test_unclosed_csv_quote_is_not_counted_as_a_bad_row(
    refused: Refused, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = refused(tmp_path / name, bad_rows="skip", bad_rows_limit=0.99)
    assert message in problem
    assert "bad_rows" not in problem


def test_tokenizer_training_and_balancing_skip_bad_rows(opened: Opened, tmp_path: Path) -> None:
    path = spoilt_lines(tmp_path / "a.jsonl")
    config = DataConfig(path=str(path), **SKIPS, balance="l")
    mix, message = balanced(config)
    assert [part.name for part in mix.mix] == ["de", "en"]
    assert "'de' 16, 'en' 20" in message
    with pytest.raises(ConfigError, match=r"a\.jsonl:8: has no 'l'"):
        balanced(DataConfig(path=str(path), balance="l"))
    assert opened(path, tokenizer=None, **SKIPS).documents == 35


def test_corpus_without_good_rows_ends_reading_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.files.data_format._MAX_LINES", 10)
    bad_lines = BadLines(limit=0.5)
    for number in range(10):
        assert not bad_lines.are_enough
        bad_lines.seen += 1
        bad_lines.add(Path("a"), f"is bad {number}", number + 1)
    assert bad_lines.are_enough
    many = BadLines(limit=0.5)
    for number in range(1000):
        many.add(Path("a"), f"is bad {chr(0x4E00 + number)}", number + 1)
    assert len(many.by_problem) < 300
    assert many.count == 1000


def test_bad_rows_are_in_the_report(tmp_path: Path) -> None:
    from harness.report.run_record import read
    from harness.report.verdicts import verdicts

    event = {"kind": "bad_rows", "message": "a.jsonl: bad rows left out: 5 of 40"}
    run = read(write_run(tmp_path / "run", events=[event, event]))
    (text,) = (verdict.text for verdict in verdicts(run) if "bad" in verdict.text)
    assert text == f"{event['message']}."


def test_lines_that_an_open_quote_joins_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"a\nb" c\nd\n')
    bad_lines = BadLines(limit=9)
    records = format_of(tmp_path / "a.csv", None).records
    assert records is not None
    assert [line for line, _ in records(tmp_path / "a.csv", bad_lines)] == [4]
    assert bad_lines.seen == 2
