"""Several real processes use one cache."""

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from harness.data import cache
from harness.data.cache import build_once, cache_key, cached_array
from harness.data.prepare import read_facts
from harness.data.tokenizer import write_tokenizer
from harness.errors import ConfigError, NoRoom
from tests.real_runs import wait_for

# New processes that share the imports they need.
FORKED = multiprocessing.get_context("fork")


def build_slowly(path: Path) -> None:
    """Record the builder beside the folder that is renamed; take a tenth of a second."""
    with (path.parent / "builders.txt").open("a") as note:
        note.write(f"{os.getpid()}\n")
    for part in range(5):
        (path / f"{part}.txt").write_text("x" * 1000)
        time.sleep(0.02)


def build_forever(path: Path) -> None:
    (path / "half.txt").write_text("half")
    time.sleep(600)


def one_of_many(folder: Path, results: multiprocessing.Queue) -> None:
    build_once(folder, build_slowly, print)
    results.put(sorted(file.name for file in folder.iterdir()))


def test_cache_is_built_by_one_of_many_processes(tmp_path: Path) -> None:
    results, count = FORKED.Queue(), 4
    arguments = (tmp_path / "made", results)
    processes = [FORKED.Process(target=one_of_many, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    names = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert names == [[f"{part}.txt" for part in range(5)]] * count
    assert len((tmp_path / "builders.txt").read_text().splitlines()) == 1
    assert not list(tmp_path.glob("*.partial-*"))


def test_built_files_are_synced_before_the_rename(tmp_path: Path, synced: list[Path]) -> None:
    build_once(tmp_path / "made", build_slowly, print)
    assert sorted(path.name for path in synced) == [f"{part}.txt" for part in range(5)]
    assert {path.parent.name.partition("-")[0] for path in synced} == {"made.partial"}


def test_without_locks_many_build_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without flock, from the point of view of the second builder."""

    def no_locks(*_: object) -> None:
        raise OSError("flock is not implemented")

    def overtaken(path: Path) -> None:
        build_slowly(path)
        os.rename(winner, tmp_path / "made")  # noqa: PTH104

    winner = tmp_path / "by another"
    winner.mkdir()
    (winner / "0.txt").write_text("by another")
    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    assert build_once(tmp_path / "made", overtaken, print) == tmp_path / "made"
    assert (tmp_path / "made" / "0.txt").read_text() == "by another"
    assert not list(tmp_path.glob("*.partial-*"))


def test_builder_of_a_longer_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.socket, "gethostname", lambda: "node1")
    for name in ("node1-7", "node1-a-7"):
        (tmp_path / f"made.partial-{name}").mkdir()
    build_once(tmp_path / "made", build_slowly, print)
    assert [path.name for path in tmp_path.glob("*.partial-*")] == ["made.partial-node1-a-7"]


def test_cache_waiters_take_over_from_a_killed_builder(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    builder = FORKED.Process(target=build_once, args=(folder, build_forever, print))
    builder.start()
    wait_for(lambda: [*tmp_path.glob("made.partial-*/half.txt")], "a build that has begun")
    reports: list[str] = []

    def kill_once_heard(text: str) -> None:
        reports.append(text)
        os.kill(builder.pid, signal.SIGKILL)
        builder.join()

    build_once(folder, build_slowly, kill_once_heard)
    assert reports == [f"waiting for the process that holds {folder}.lock"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{part}.txt" for part in range(5)]
    assert not [*tmp_path.glob("made.partial-*")]


def test_a_failed_build_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        (path / "half.txt").write_text("half")
        raise ValueError("bad line")

    with pytest.raises(ValueError, match="bad line"):
        build_once(tmp_path / "made", fail, print)
    assert [file.name for file in tmp_path.iterdir()] == ["made.lock"]
    build_once(tmp_path / "made", build_slowly, print)
    assert (tmp_path / "made" / "4.txt").exists()


def test_a_cache_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.cache_dir: cannot use /proc/nowhere"):
        build_once(Path("/proc/nowhere/made"), build_slowly, print)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_cache_that_may_not_be_entered_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    results = FORKED.Queue()
    stranger = FORKED.Process(target=as_nobody, args=(tmp_path / "closed" / "cache", results))
    stranger.start()
    assert "data.cache_dir: cannot use" in results.get(timeout=60)
    stranger.join()


def as_nobody(cache: Path, results: multiprocessing.Queue) -> None:
    os.setuid(65534)
    try:
        build_once(cache / "made", build_slowly, print)
    except ConfigError as error:
        results.put(str(error))
    except BaseException as error:
        results.put(repr(error))


def test_a_full_disk_is_named_whoever_writes(small_disk: Path) -> None:
    """Rust writes the tokenizer's file, and its error is a plain Exception."""
    (small_disk / "filler").write_bytes(bytes((6 << 20) - (16 << 10)))
    words = [f"word{number}" for number in range(20_000)]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="word0")
    with pytest.raises(NoRoom, match=r"data\.cache_dir: cannot use .*No space left on device"):
        build_once(small_disk / "made", partial(write_tokenizer, tokenizer), print)
    assert NoRoom.code == 74
    assert sorted(file.name for file in small_disk.iterdir()) == ["filler", "made.lock"]


def test_cache_lock_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    for path in (folder / "train.npy", folder / "split.json", tmp_path / "made.lock"):
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"train\.npy cannot be read .*not a regular file"):
        cached_array(folder / "train.npy", np.dtype("i4"))
    with pytest.raises(ConfigError, match=r"split\.json cannot be read .*not a regular file"):
        read_facts(folder)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: cannot use .*made\.lock"):
        build_once(tmp_path / "made", build_slowly, print)


def test_damaged_facts_of_a_split_are_named(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"fingerprint": "a", "add_separator": True, "documents": 1}
    facts |= {"lowest_id": 0, "shorter": 0, "longer": 0}
    (tmp_path / "split.json").write_text(json.dumps({**facts, "highest_id": 3}))
    assert read_facts(tmp_path).highest_id == 3
    another_type = json.dumps({**facts, "highest_id": "3"})
    for text in ("", "[]", "{}", "null", '{"documents": "x"}', "9" * 5000, another_type):
        (tmp_path / "split.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"{tmp_path}/split\.json cannot be .*: remove"):
            read_facts(tmp_path)
    with pytest.raises(ConfigError, match="'highest_id': '3'"):
        read_facts(tmp_path)


def test_cache_keys_distinguish_all_settings() -> None:
    keys = {cache_key(a=a, b=b) for a in (1, "1", None) for b in (0.1, [1, "x"], [[1], "x"])}
    assert len(keys) == 9
    assert cache_key(a=1, b=2) == cache_key(b=2, a=1)
