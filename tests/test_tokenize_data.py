"""After tokenize_data.py, the run has nothing left to tokenize."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.data import shards, source
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.pair import IndexedTokens
from harness.data.spec import DataSpec
from harness.errors import ExitCode
from harness.layout.world import World
from harness.plan.make import make_plan
from tests.data import test_begins
from tests.data.chat_tokenizers import tokenizer_of
from tests.data.number_tokenizer import write_number_tokenizer
from tests.data.test_chats import BOT, CLOCK, USER
from tests.real_runs import REPOSITORY, wait_for
from tests.tables import beside
from tools.tokenize_data import main

WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905


def records(count: int) -> list[dict[str, str]]:
    words = ((WORDS[(n * 7 + k) % len(WORDS)] for k in range(5 + n % 30)) for n in range(count))
    return [{"text": " ".join(each)} for each in words]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shards.shards_of
    monkeypatch.setattr(shards, "shards_of", lambda corpus, _: whole(corpus, 2000))


def opened(*assignments: str) -> Data:
    return build_data(DataSpec.of_run(load_run_config(None, assignments), {}))


@pytest.fixture
def asked(tmp_path: Path, write_jsonl: Callable[..., Path]) -> list[str]:
    """Return the words for a corpus of 200 documents."""
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    return [f"data.path={write_jsonl(*records(200))}", cache, "data.vocab_size=300"]


@pytest.mark.usefixtures("small_shards")
def test_the_run_only_opens_what_was_tokenised(
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = write_jsonl(*records(200)), write_jsonl(*records(90), name="two.jsonl")
    asked = [
        f'data.mix=[{{path="{one}", share=1}}, {{path="{two}", share=2}}]',
        f"data.eval_path={two}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.vocab_size=300",
        "data.seq_len=16",
    ]
    # Tasks of an array, in any order; the last one joins.
    assert main([*asked, "--tasks=2", "--task=1", "--workers=2"]) == ExitCode.DONE
    assert "shards of" in capsys.readouterr().out
    assert main([*asked, "--tasks=2", "--task=0", "--workers=2"]) == ExitCode.DONE
    assert "tokenised data: " in capsys.readouterr().out
    monkeypatch.setattr(source, "write_tokens", None)  # a run would call it
    data = opened(*asked)
    assert data.documents == 290
    assert main(asked) == ExitCode.DONE  # nothing left to do


@pytest.mark.usefixtures("small_shards")
def test_tokenised_held_out_and_skipped_rows_equal_the_run(tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("train", 200), ("test", 40)):
        lines = [json.dumps(record) for record in records(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(["{", *lines]))
    asked = [f"data.path={folder}", f"data.cache_dir={tmp_path / 'cache'}", "data.vocab_size=300"]
    asked += ["data.seq_len=16", "data.bad_rows=skip"]
    assert main([*asked, "--workers=2"]) == ExitCode.DONE
    assert "bad rows left out: 1 of 201" in capsys.readouterr().out
    monkeypatch.setattr(source, "write_tokens", None)  # a run would call it
    plan = make_plan(load_run_config(None, asked), {}, World(), here=True)
    data = build_data(DataSpec.of_run(plan.config, {}))
    assert (data.documents, [*data.eval_sets]) == (200, ["test"])
    assert [event["skipped"] for event in data.events() if event["kind"] == "bad_rows"] == [1, 1]
    assert main([*asked, "--out", str(tmp_path / "tokens")]) == ExitCode.DONE
    line = capsys.readouterr().out
    assert "200 documents" in line
    assert "; split train (not read: test); bad rows left out: 1 of 201 (0.5%)" in line


@pytest.mark.usefixtures("small_shards")
def test_tasks_that_end_together_write_one_pair(tmp_path, asked: list[str], monkeypatch) -> None:
    """The second finds all shards finished while the first joins them."""
    out, begun, whole = tmp_path / "tokens", tmp_path / "cache" / "begun", shards.join_indexed
    child = os.fork()
    if not child:
        wait_for(begun.exists, "a join that has begun")
        monkeypatch.setattr(shards, "join_indexed", None)  # only the first may call it
        os._exit(main([*asked, "--out", str(out)]))

    def join_late(parts: Sequence[Path], prefix: Path) -> None:
        begun.touch()
        wait_for(lambda: _waits_for_a_lock(child), "the other, which comes as far as it can")
        whole(parts, prefix)

    monkeypatch.setattr(shards, "join_indexed", join_late)
    assert main([*asked, "--out", str(out)]) == ExitCode.DONE
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ExitCode.DONE
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("cache", "data.jsonl", "tokens.bin", "tokens.idx", "tokens.made-from.json")
    ]
    before = out.with_suffix(".bin").read_bytes()
    out.with_suffix(".bin").unlink()
    out.with_suffix(".idx").unlink()
    monkeypatch.setattr(shards, "join_indexed", whole)
    assert main([*asked, "--out", str(out)]) == ExitCode.DONE  # removed files are made again
    assert out.with_suffix(".bin").read_bytes() == before


def _waits_for_a_lock(process: int) -> bool:
    locks = Path("/proc/locks").read_text().splitlines()
    return any("-> FLOCK" in line and f" {process} " in line for line in locks)


@pytest.mark.usefixtures("small_shards")
def test_token_pair_equals_the_data_it_was_made_from(tmp_path, asked: list[str], capsys) -> None:
    corpus, out = tmp_path / "data.jsonl", tmp_path / "tokens"
    assert main([*asked, "--out", str(out)]) == ExitCode.DONE
    assert "200 documents" in capsys.readouterr().out
    before = out.with_suffix(".bin").read_bytes()
    assert main([*asked, "--out", str(out)]) == ExitCode.DONE
    assert out.with_suffix(".bin").read_bytes() == before
    data = opened(*asked, "data.seq_len=16")
    tokenizer = next((tmp_path / "cache").glob("tokenizer-*[!k]"))
    pair = opened(f"data.path={out}", f"data.tokenizer={tokenizer}", "data.seq_len=16")
    assert data.fingerprint == pair.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("cache", "data.jsonl", "tokens.bin", "tokens.idx", "tokens.made-from.json")
    ]
    corpus.write_text(json.dumps({"text": "other"}) + "\n")
    assert main([*asked, "--out", str(out)]) == ExitCode.BAD_CONFIG
    assert "not made from this data" in capsys.readouterr().err


def test_a_pair_holds_no_bos_token_that_would_be_learned(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = test_begins.tokenizer_of("bytes")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path, out = write_jsonl(*({"text": "the model"} for _ in range(20))), tmp_path / "tokens"
    asked = [f"data.path={path}", f"data.tokenizer={tmp_path / 'tokenizer'}"]
    asked.append(f"data.cache_dir={tmp_path / 'cache'}")
    assert main([*asked, f"--out={out}", "--workers=1"]) == ExitCode.DONE
    assert "without the bos token that data.bos=auto adds to text" in capsys.readouterr().out
    pair = IndexedTokens(out)
    assert tokenizer.bos_token_id not in pair.ids.block(0, len(pair.ids))
    text = opened(*asked, "data.bos=off", "data.seq_len=4")
    asked[0] = f"data.path={out}"
    assert opened(*asked, "data.seq_len=4").fingerprint == text.fingerprint


def test_chats_with_a_date_are_found_by_the_run_of_that_date(
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = CLOCK + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_jsonl(*({"messages": [USER, BOT]} for _ in range(20)))
    asked = [f"data.path={path}", f"data.tokenizer={tmp_path / 'tokenizer'}", "data.seq_len=64"]
    asked += [f"data.cache_dir={tmp_path / 'cache'}", "--workers=1"]
    assert main(asked) == ExitCode.BAD_CONFIG
    assert "data.date: the chat template writes the date into" in capsys.readouterr().err
    assert main([*asked, "data.date=2026-01-31"]) == ExitCode.DONE
    assert "; train with data.date=2026-01-31" in capsys.readouterr().out
    monkeypatch.setattr(source, "write_tokens", None)  # a run would call it
    assert opened(*asked[:-1], "data.date=2026-01-31").documents == 20


@pytest.mark.gate("data")
@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("into", ["cache", "pair"])
def test_the_whole_command_is_killed_in_both_phases(
    tmp_path: Path, write_jsonl: Callable[..., Path], into: str
) -> None:
    """By SIGKILL to its process group, as by an out-of-memory killer or a failing node."""
    corpus, tokenizer = write_jsonl(*records(200)), write_number_tokenizer(tmp_path / "numbers")

    def asked(folder: str) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        return [
            *(f"data.path={corpus}", f"data.tokenizer={tokenizer}", "--workers=2"),
            f"data.cache_dir={tmp_path / folder}",
            *([f"--out={tmp_path / folder / 'tokens'}"] if into == "pair" else []),
            "data.seq_len=16",
        ]

    def killed(phase: str, sign: str, count: int) -> None:
        code = beside(__file__, "tokenize_data.toml")["command"]
        words = [sys.executable, "-c", code, phase, *asked("killed")]
        process = subprocess.Popen(words, cwd=REPOSITORY, start_new_session=True)
        wait_for(lambda: process.poll() or len([*(tmp_path / "killed").glob(sign)]) >= count, sign)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    assert main(asked("whole")) == ExitCode.DONE
    killed("shards", "tokens*-shards/[0-9]*[0-9]", 2)
    finished = len([*(tmp_path / "killed").glob("tokens*-shards/[0-9]*[0-9]")])
    killed("join", "tokens*.partial-*/begun", 1)
    assert len([*(tmp_path / "killed").glob("tokens*-shards/[0-9]*[0-9]")]) > finished
    assert main(asked("killed")) == ExitCode.DONE

    def tree(folder: str) -> dict[str, bytes]:
        files = (path for path in (tmp_path / folder).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / folder)): path.read_bytes() for path in files}

    assert tree("killed") == tree("whole")


def test_tokenize_data_reports_all_problems_at_once(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--workers=0", "--task=1", f"--out={tmp_path}/no/tokens", "data.pth=x"]
    pairs = write_jsonl({"prompt": "a", "completion": "b"})
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    asked = [f"data.path={pairs}", cache, "data.vocab_size=300", f"--out={tmp_path / 'tokens'}"]
    every = "5 problems|--workers is 0|--task is 1 of --tasks 1|there is no folder|data.path?"
    for words, parts in (
        ([*wrong, "data.seq_len=0"], every),
        (asked, "holds prompts and completions"),
        ([*asked, "data.rehearse=old", "data.eval_path=e"], "remove data.eval_path, data.rehearse"),
        ([f"data.path={tmp_path / 'lost'}", cache], "does not exist"),
    ):
        assert main(words) == ExitCode.BAD_CONFIG
        report = capsys.readouterr().err
        assert [part for part in parts.split("|") if part not in report] == []
