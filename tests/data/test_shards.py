"""A corpus in shards becomes exactly the bytes that one process writes, whatever interrupts it."""

import contextlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from harness.data.encoding import HowEncoded
from harness.data.prepare import MASKS, NOTES, SKIPPED, TOKENS, write_tokens
from harness.data.rendering import set_template
from harness.data.shards import ShardedTokens, shards_of
from harness.data.tokenizer import load_tokenizer, train_tokenizer
from harness.errors import ConfigError
from harness.files.corpus import find_corpus
from tests.data.conftest import Opened, Refused, Written
from tests.real_runs import wait_for
from tools.workers import run_workers

FILES = (f"{TOKENS}.bin", f"{TOKENS}.idx", MASKS, NOTES)
WORDS = "the model reads a text and learns which word follows another, naïvely".split()  # noqa: SIM905
LEAST = 1500
Sharded = Callable[..., ShardedTokens]


def words(number: int) -> str:
    return " ".join(WORDS[(number * 7 + place) % len(WORDS)] for place in range(3 + number % 40))


def a_text(number: int) -> dict[str, object]:
    return {"text": words(number)}


def a_line(number: int) -> dict[str, object]:
    """Return a record of 78 bytes, `unread` in the first included: ranges begin where lines do."""
    return {"text": words(13)[: 47 if number == 0 else 60]}


def a_pair(number: int) -> dict[str, object]:
    return {"prompt": words(number), "completion": f" {number} {words(number + 1)}"}


def a_chat(number: int) -> dict[str, object]:
    turns = [
        {"role": "user", "content": words(number)},
        {"role": "assistant", "content": f"{number} {words(number + 2)}"},
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": words(number + 3)},
    ]
    return {"messages": turns}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("\n".join(map(words, range(200))))
    train_tokenizer([find_corpus(str(folder / "text.txt"))], folder, 320)
    tokenizer = load_tokenizer(folder)
    set_template(tokenizer, "chatml")
    return tokenizer


def nothing(_: object) -> None:
    pass


def write_and_join(tokens: ShardedTokens) -> None:
    for number in reversed(tokens.missing()):  # in any order
        tokens.write(number, nothing)
    tokens.join(nothing)


def assert_as_one_process_writes(tokens: ShardedTokens) -> None:
    folder = tokens.folder.with_name(f"whole {tokens.folder.name}")
    folder.mkdir()
    write_tokens(tokens.corpus, tokens._tokenizer, HowEncoded(), folder, lambda line: None)
    for name in FILES:
        assert (tokens.folder / name).read_bytes() == (folder / name).read_bytes()


@pytest.fixture
def sharded(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Sharded:
    """Return a function that returns the shards of a path, to be joined in a folder."""

    def shards(path: Path, name: str = "joined", **options: Any) -> ShardedTokens:
        corpus = find_corpus(str(path), **options)
        return ShardedTokens(corpus, tokenizer, HowEncoded(), tmp_path / name, LEAST)

    return shards


@pytest.mark.parametrize("record", [a_text, a_line, a_pair, a_chat])
def test_lines_in_shards_are_the_same_tokens(
    record: Callable[[int], dict[str, Any]], write_jsonl: Written, sharded: Sharded, tmp_path: Path
) -> None:
    first, *others = map(record, range(200))
    tokens = sharded(write_jsonl({**first, "unread": 1}, *others))
    assert len(tokens.shards) > 8
    write_and_join(tokens)
    assert tokens.missing() == []
    assert_as_one_process_writes(tokens)
    assert not [path for path in tmp_path.iterdir() if "shards" in path.name]


def test_more_shards_than_open_files_are_joined(sharded: Sharded, write_jsonl: Written) -> None:
    tokens = sharded(write_jsonl(*map(a_pair, range(500))))
    assert len(tokens.shards) > 50
    for number in tokens.missing():
        tokens.write(number, nothing)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len([*Path("/proc/self/fd").iterdir()]) + 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        tokens.join(nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_as_one_process_writes(tokens)


def test_row_groups_of_one_file_are_the_same_tokens(sharded: Sharded, tmp_path: Path) -> None:
    """A row without text is reported by its position in the file, whichever shard it is in."""
    rows = [a_text(number) for number in range(200)]
    table = pyarrow.Table.from_pylist(rows)
    file = tmp_path / "rows.parquet"
    parquet.write_table(table, file, row_group_size=7, compression="none", use_dictionary=False)
    tokens = sharded(file)
    assert len(tokens.shards) > 5
    write_and_join(tokens)
    assert_as_one_process_writes(tokens)

    rows[150] = {"text": None}
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=7, compression="none")
    with pytest.raises(ConfigError, match=r"rows\.parquet:151: "):
        write_and_join(sharded(file, "damaged"))


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_parquet_leaves_nothing_half_written(
    opened: Opened, refused: Refused, tmp_path: Path, kept: float
) -> None:
    def finished() -> set[Path]:
        return {path for path in tmp_path.glob("cache/**/*") if path.suffix != ".lock"}

    rows, file = [a_text(number) for number in range(2000)], tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=100)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    (problem,) = refused(file)
    assert re.search(r"cannot read .*rows\.parquet", problem)
    assert not finished()
    file.write_bytes(whole)
    assert opened(file).documents == len(rows)
    # An intact footer over damaged groups: the last of them cannot be read.
    file.write_bytes(whole[: len(whole) // 3] + b"\0" * 4000 + whole[len(whole) // 3 + 4000 :])
    before = finished()
    assert "rows.parquet" in refused(file)[0]
    assert finished() == before


def test_files_are_put_together_and_large_ones_divided(tmp_path: Path, sharded: Sharded) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"a{number:02}.txt").write_text(words(number))
    (folder / "b.jsonl").write_text("".join(json.dumps(a_text(n)) + "\n" for n in range(90)))
    (folder / "c.json").write_text(json.dumps([a_text(n) for n in range(90)]))  # not line by line
    (folder / "d.csv").write_text("text\n" + "".join(f"{words(n)[:9]}\n" for n in range(9)))
    tokens = sharded(folder)
    shards = shards_of(tokens.corpus, LEAST)
    assert sum(shard.num_bytes for shard in shards) == tokens.corpus.num_bytes()
    assert {len(shard.files) > 1 for shard in shards} == {True, False}
    assert len([shard for shard in shards if shard.between]) > 3
    write_and_join(tokens)
    assert_as_one_process_writes(tokens)


def test_killed_workers_leave_work_that_goes_on(write_jsonl: Written, sharded: Sharded) -> None:
    tokens = sharded(write_jsonl(*map(a_pair, range(400))))
    counts = []
    for finished in (1, 4, 9):
        child = os.fork()
        if not child:  # the tool, which dies with its workers
            os.setpgid(0, 0)
            run_workers(until(tokens, finished), tokens.missing(), 2, nothing)
            os._exit(0)
        wait_for(lambda: len(tokens.shards) - len(tokens.missing()) >= finished, "shards")  # noqa: B023
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_for(lambda: not alive(child), "the end of the workers")  # noqa: B023
        counts.append(len(tokens.missing()))
    assert len(tokens.shards) > counts[0] > counts[1] > counts[2] > 0
    run_workers(tokens.write, tokens.missing(), 2, nothing)
    tokens.join(nothing)
    assert_as_one_process_writes(tokens)


def alive(group: int) -> list[str]:
    """Return the processes of a group that are still running."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            texts.append(path.read_text().rpartition(")")[2].split())
    return [state for state, _, of, *_ in texts if int(of) == group and state not in "ZX"]


def until(tokens: ShardedTokens, finished: int) -> Callable[[int, Callable[[int], None]], None]:
    """Return work that stops within a shard once `finished` shards are done."""

    def write(number: int, progress: Callable[[int], None]) -> None:
        def slowly(count: int) -> None:
            while len(tokens.shards) - len(tokens.missing()) >= finished:
                time.sleep(0.01)

        tokens.write(number, slowly)

    return write


def test_joined_shards_are_kept(tmp_path: Path, write_jsonl: Written, sharded: Sharded) -> None:
    path = write_jsonl(*map(a_text, range(200)))
    ours, theirs = (sharded(path) for _ in range(2))
    for number in ours.missing():
        ours.write(number, nothing)
    assert theirs.missing() == []
    ours.join(nothing)
    theirs.join(nothing)  # shards that no longer exist
    assert theirs.missing() == []
    ours.remove()
    assert len(theirs.missing()) == len(ours.shards)
    assert [path.name for path in tmp_path.iterdir() if "joined" in path.name] == []


def test_bad_lines_are_those_that_one_process_reports(tmp_path: Path, sharded: Sharded) -> None:
    lines = [json.dumps(a_text(n)) for n in range(300)]
    lines[3] = "{"
    lines[150] = '{"texts": "a"}'
    lines[151] = ""
    lines[152] = '{"text": 5}'
    lines[299] = '{"text": 6}'
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    tokens = sharded(path)
    with pytest.raises(ConfigError) as by_shards:
        write_and_join(tokens)
    with pytest.raises(ConfigError) as at_once:
        assert_as_one_process_writes(tokens)
    assert by_shards.value.problems == at_once.value.problems
    assert "bad.jsonl:151" in str(by_shards.value)

    tokens = sharded(path, "skipped", bad_rows_limit=4)
    write_and_join(tokens)
    assert_as_one_process_writes(tokens)
    kept = [(tmp_path / name / SKIPPED).read_text() for name in ("skipped", "whole skipped")]
    assert kept[0] == kept[1]
    assert json.loads(kept[0])["seen"] == 299  # one line is blank


def test_a_chat_among_text_is_seen_in_any_shard(write_jsonl: Written, sharded: Sharded) -> None:
    records = [a_text(n) for n in range(200)]
    tokens = sharded(write_jsonl(*records[:150], a_chat(1), *records[150:]))
    with pytest.raises(ConfigError, match=r"data.jsonl:151: holds a conversation, but .*:1 holds"):
        write_and_join(tokens)
