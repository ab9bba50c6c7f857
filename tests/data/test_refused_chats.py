"""Conversations and mixed kinds of rows that are refused, each with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from harness.data.corpus import find_corpus
from harness.data.encoding import Encoder, HowEncoded
from harness.errors import ConfigError
from harness.files.chat import Chat
from harness.files.data_format import BadLines
from tests.data.chat_tokenizers import tokenizer_of
from tests.data.test_chats import BOT, CALLS, USER, opened


def test_conversations_are_not_mixed_with_other_text(tmp_path: Path) -> None:
    tokenizer_of("chatml").save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "about.md").write_text("About these chats.")
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [USER, BOT]}) + "\n")
    with pytest.raises(ConfigError) as caught:
        opened(folder, tmp_path, tokenizer=str(tmp_path / "tokenizer"))
    assert caught.value.problems == [
        f"data.path: {folder}/chats.jsonl:1: holds a conversation, but {folder}/about.md:1 holds "
        "other text: name one of them, or move it; data.bad_rows=skip leaves such rows out, and "
        "counts them"
    ]
    (folder / "about.md").rename(folder / "later.md")
    with pytest.raises(ConfigError) as caught:
        opened(folder, tmp_path, tokenizer=str(tmp_path / "tokenizer"), bad_rows="skip")
    assert caught.value.problems == [
        f"data.path: cannot read {folder}/later.md: it holds other text, but {folder}/chats.jsonl"
        ":1 holds a conversation: name one of them, or move it"
    ]


def test_a_conversation_of_many_megabytes_is_named(
    tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    long = {"role": "assistant", "content": "word " * (4 << 20)}
    path = write_jsonl({"messages": [USER, BOT]}, {"messages": [USER, long]})
    tokenizer_of("chatml").save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r":2: is a conversation of more than 16,777,216 char"):
        opened(path, tmp_path, tokenizer=str(tmp_path / "tokenizer"))


def test_calls_that_are_nested_too_deeply_are_named(write_jsonl: Callable[..., Path]) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
    arguments: dict[str, object] = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    deep = Chat([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    corpus = find_corpus(str(write_jsonl({"messages": [USER, BOT]})))
    encoder = Encoder(corpus, tokenizer, HowEncoded())
    good, bad = encoder._encode([Chat([USER, BOT]), deep])
    assert bad == "is nested too deeply" != good


ROWS = {
    "a conversation": {"messages": [USER, BOT]},
    "token ids": {"input_ids": [1, 2]},
    "other text": {"text": "a"},
}


@pytest.mark.parametrize(("first", "second"), [*permutations(ROWS, 2)])
def test_kinds_of_rows_are_not_mixed(
    write_jsonl: Callable[..., Path], first: str, second: str
) -> None:
    path = write_jsonl(ROWS[first], ROWS[second], ROWS[first])
    bad_lines = BadLines()
    assert [part.kind for part in find_corpus(str(path)).parts(bad_lines)] == [first, first]
    (problem,) = bad_lines.problems()
    assert problem.startswith(f"data.path: {path}:2: holds {second}, but {path}:1 holds {first}: ")
