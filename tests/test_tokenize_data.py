"""tokenize_data.py leaves nothing to tokenise for the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.data import shards, source
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.errors import ExitCode
from tests.run_tools import printed
from tools.tokenize_data import main

WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905


def records(count: int) -> list[dict[str, str]]:
    return [
        {"text": " ".join(WORDS[(n * 7 + k) % len(WORDS)] for k in range(5 + n % 30))}
        for n in range(count)
    ]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shards.shards_of
    monkeypatch.setattr(shards, "shards_of", lambda corpus, _: whole(corpus, 2000))


def opened(*assignments: str) -> Data:
    return build_data(DataSpec.of_run(load_run_config(None, assignments), {}))


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
    monkeypatch.setattr(source, "write_tokens", None)  # what a run would call
    data = opened(*asked)
    assert data.documents == 290
    assert main(asked) == ExitCode.DONE  # nothing left to do


@pytest.mark.usefixtures("small_shards")
def test_tasks_that_end_together_write_one_pair(
    tmp_path: Path, write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds all shards finished while the first joins them."""
    corpus, out = write_jsonl(*records(200)), tmp_path / "tokens"
    asked = [f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}", "data.vocab_size=300"]
    begun, whole = tmp_path / "cache" / "begun", shards.join_indexed
    child = os.fork()
    if not child:
        while not begun.exists():
            time.sleep(0.01)
        monkeypatch.setattr(shards, "join_indexed", None)  # what only the first may do
        os._exit(main([*asked, "--out", str(out)]))

    def join_slowly(parts: Sequence[Path], prefix: Path) -> None:
        begun.touch()
        time.sleep(1)  # in which the other comes as far as it can
        whole(parts, prefix)

    monkeypatch.setattr(shards, "join_indexed", join_slowly)
    assert main([*asked, "--out", str(out)]) == ExitCode.DONE
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ExitCode.DONE
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("cache", "data.jsonl", "tokens.bin", "tokens.idx", "tokens.made-from.json")
    ]
    before = out.with_suffix(".bin").read_bytes()
    out.with_suffix(".bin").unlink()
    out.with_suffix(".idx").unlink()
    monkeypatch.setattr(shards, "join_indexed", whole)
    assert main([*asked, "--out", str(out)]) == ExitCode.DONE  # what was removed is made again
    assert out.with_suffix(".bin").read_bytes() == before


@pytest.mark.usefixtures("small_shards")
def test_a_pair_is_the_same_data(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = write_jsonl(*records(200)), tmp_path / "tokens"
    asked = [f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}", "data.vocab_size=300"]
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


def test_all_problems_come_at_once(
    tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--workers=0",
        "--task=3",
        f"--out={tmp_path}/no/tokens",
        "data.pth=x",
        "data.seq_len=0",
    ]
    assert main(words) == ExitCode.BAD_CONFIG
    report = capsys.readouterr().err
    assert "5 problems" in report
    for part in ("--workers is 0", "--task is 3 of --tasks 1", "there is no folder", "data.path?"):
        assert part in report
    pairs = write_jsonl({"prompt": "a", "completion": "b"})
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    asked = [f"data.path={pairs}", cache, "data.vocab_size=300", f"--out={tmp_path / 'tokens'}"]
    assert main(asked) == ExitCode.BAD_CONFIG
    assert "holds prompts and completions" in capsys.readouterr().err
    assert main([*asked, "data.rehearse=old", "data.eval_path=e"]) == ExitCode.BAD_CONFIG
    assert "remove data.eval_path, data.rehearse" in capsys.readouterr().err
    assert main([f"data.path={tmp_path / 'lost'}", cache]) == ExitCode.BAD_CONFIG
    assert "does not exist" in capsys.readouterr().err


def test_help_and_refusals_need_no_torch() -> None:
    code = (
        "import sys; from tools.tokenize_data import main; main(['--workers=0'])\n"
        "print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    assert printed(code).endswith("set()\n")
