"""Rejected conversations with their positions; the cost of finding turns; rows of mixed kinds."""

import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from harness.config.data_section import DataConfig
from harness.data.chat_tokens import ChatEncoder
from harness.data.encoding import Encoder, HowEncoded
from harness.data.rendering import ChatTemplate
from harness.errors import ConfigError
from harness.files.chat import Chat
from harness.files.corpus import find_corpus
from harness.files.data_format import BadLines
from tests.data.chat_tokenizers import tokenizer_of
from tests.data.conftest import Refused, Written
from tests.data.glancing import glance
from tests.data.test_chats import BOT, CALLS, PROMPT, USER, without_marks


def test_chats_are_not_mixed_with_text(refused: Refused, tmp_path: Path, chatml_dir: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "about.md").write_text("About these chats.")
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [USER, BOT]}) + "\n")
    assert refused(folder, tokenizer=chatml_dir) == [
        f"data.path: {folder}/chats.jsonl:1: holds a conversation, but {folder}/about.md:1 holds "
        "other text: name one of them, or move it"
    ]
    (folder / "about.md").rename(folder / "later.md")
    assert refused(folder, tokenizer=chatml_dir, bad_rows="skip") == [
        f"data.path: cannot read {folder}/later.md: it holds other text, but {folder}/chats.jsonl"
        ":1 holds a conversation: name one of them, or move it"
    ]


def test_large_chat_is_named(refused: Refused, write_jsonl: Written, chatml_dir: str) -> None:
    long = {"role": "assistant", "content": "word " * (4 << 20)}
    path = write_jsonl({"messages": [USER, BOT]}, {"messages": [USER, long]})
    (problem,) = refused(path, tokenizer=chatml_dir)
    assert ":2: is a conversation with more than 16,777,216 char" in problem


def test_calls_that_are_nested_too_deeply_are_named(write_jsonl: Written) -> None:
    template = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
    arguments: dict[str, object] = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    deep = Chat([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    corpus = find_corpus(str(write_jsonl({"messages": [USER, BOT]})))
    encoder = Encoder(corpus, tokenizer_of("chatml", template), HowEncoded())
    good, bad = encoder._encode([Chat([USER, BOT]), deep])
    assert bad == "is nested too deeply" != good


ROWS: dict[str, Any] = {"a conversation": {"messages": [USER, BOT]}}
ROWS |= {"token ids": {"input_ids": [1, 2]}, "other text": {"text": "a"}}


@pytest.mark.parametrize(("first", "second"), [*permutations(ROWS, 2)])
def test_kinds_of_rows_are_not_mixed(write_jsonl: Written, first: str, second: str) -> None:
    path = write_jsonl(ROWS[first], ROWS[second], ROWS[first])
    bad_lines = BadLines()
    assert [part.kind for part in find_corpus(str(path)).parts(bad_lines)] == [first, first]
    (problem,) = bad_lines.problems()
    assert problem.startswith(f"data.path: {path}:2: holds {second}, but {path}:1 holds {first}: ")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        glance(DataConfig(path=str(path)))


TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("tags", [f"<{'think' * 20_000}>", "<think>" * 5000])
def test_tags_of_thoughts_in_a_users_text_are_passed_at_once(tags: str) -> None:
    prompt = PROMPT.replace("assistant\n", "assistant\n<think>\n")
    tokenizer = tokenizer_of("chatml", TURNS + prompt)
    chat = Chat([{"role": "user", "content": f"a {tags} ?"}, BOT])
    rendered = ChatEncoder(tokenizer, "assistant").render(chat)
    ((start, stop),) = rendered.learned
    assert rendered.text[start:stop] == "b.<|im_end|>"


# It rejects marked texts, so all ways to mark them are tried.
REFUSING = "{% if 'Qz' in m.content %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(("learn", "refuses", "most"), [("last", False, 4), ("all", False, 2),
                                                       ("all", True, 3)])  # fmt: skip
def test_turns_that_nothing_is_asked_of_are_not_rendered(
    monkeypatch: pytest.MonkeyPatch, learn: str, refuses: bool, most: int
) -> None:
    tokenizer, rendered = without_marks(tokenizer_of("chatml")), []
    if refuses:
        loop = "{%- for m in messages %}"
        tokenizer.chat_template = f"{loop}{REFUSING}{{%- endfor %}}{tokenizer.chat_template}"
    encoder, render = ChatEncoder(tokenizer, learn), ChatTemplate._render

    def counted(self: ChatTemplate, messages: Any, *more: Any, **options: Any) -> Any:
        rendered.append(len(messages))
        return render(self, messages, *more, **options)

    monkeypatch.setattr(ChatTemplate, "_render", counted)
    encoder.render(Chat([USER, BOT] * 20))
    assert len(rendered) <= most


@pytest.mark.parametrize("is_first", [True, False])
def test_the_last_turn_alone_is_advised_where_it_is_found(is_first: bool) -> None:
    test = "loop.first or loop.index == 2" if is_first else "loop.last"
    role = f"(m.role if m.role == 'user' or not ({test}) else 'bot') +"
    tokenizer = tokenizer_of("chatml", TURNS.replace("m.role +", role) + PROMPT)
    chat = Chat([USER, BOT, USER, {"role": "assistant", "content": "c."}])
    with pytest.raises(ValueError, match="does not begin with its generation prompt") as caught:
        ChatEncoder(tokenizer, "assistant").render(chat)
    assert ("data.learn=last" in str(caught.value)) == is_first
    if is_first:
        assert ChatEncoder(tokenizer, "last").render(chat).learned


def test_template_that_rejects_a_conversation_prefix_is_named() -> None:
    tokenizer = without_marks(tokenizer_of("chatml"))
    even = "{% if messages | length == 2 %}{{ raise_exception('too short') }}{% endif %}"
    tokenizer.chat_template = even + tokenizer.chat_template
    with pytest.raises(ValueError, match="rejects the conversation up to that turn: TemplateErr"):
        ChatEncoder(tokenizer, "assistant").render(Chat([USER, BOT, USER, BOT]))
