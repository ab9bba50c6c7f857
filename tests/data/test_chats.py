"""Chats are rendered and masked turn by turn as transformers' apply_chat_template does."""

import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from harness.data.chat_tokens import ChatEncoder, divided_control_tokens
from harness.data.pair import IndexedTokens, load_masks
from harness.data.rendering import set_template
from harness.data.tokenizer import load_tokenizer
from harness.data.tokenizer_files import SpecialIds
from harness.data.turn_places import TurnFinder
from harness.files.chat import Chat, chat_of, read_template
from harness.files.turns import turn_of
from tests.data.chat_tokenizers import STYLES, TOOLS, chats, tokenizer_of, write_chats
from tests.data.conftest import Opened, Refused, Written
from tests.tables import beside

USER, BOT = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}
TABLES = beside(__file__, "chats.toml", with_parts=True)
TEMPLATES = TABLES["templates"]
PROMPT, CLOCK, BLOCKS = (TEMPLATES[name] for name in ("prompt", "clock", "blocks"))
CALLS = TEMPLATES["calls"] + PROMPT
CALLED = [USER, TABLES["parts"]["called"]]
style = pytest.mark.parametrize("style", STYLES)


def runs_of(mask: list[int]) -> list[tuple[int, int]]:
    """Return the places of consecutive learned tokens."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def encoded(
    tokenizer: PreTrainedTokenizerFast, chat: Chat, learn: str = "assistant"
) -> tuple[list[int], list[int]]:
    """Return the ids, and 1 for each learned one."""
    encoder = ChatEncoder(tokenizer, learn)
    (result,) = encoder.encode([encoder.render(chat)])
    mask = np.zeros(len(result.ids), dtype=int)
    for start, stop in result.learned:
        mask[start:stop] = 1
    return result.ids, mask.tolist()


def by_transformers(
    tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, Any]], tools: object
) -> tuple[list[int], list[int]]:
    result = tokenizer.apply_chat_template(
        turns, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return result["input_ids"], result["assistant_masks"]


def without_marks(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer with a template that does not mark the assistant's part of a turn."""
    template, marks = re.subn(r"\{%-?\s*(end)?generation\s*-?%\}", "", tokenizer.chat_template)
    assert marks == 2
    copy = deepcopy(tokenizer)
    copy.chat_template = re.sub(r"\n\s*\n", "\n", template)
    return copy


@style
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("has_marks", [True, False])
def test_tokens_and_masks_equal_transformers(style: str, tools: object, has_marks: bool) -> None:
    tokenizer = tokenizer_of(style)
    masked = tokenizer if has_marks else without_marks(tokenizer)
    end = tokenizer.convert_tokens_to_ids(STYLES[style].end)
    for turns in chats(20, tools=tools is not None):
        ids, mask = by_transformers(tokenizer, turns, tools)
        assert encoded(masked, Chat(turns, tools)) == (ids, mask)
        # Each assistant turn is one run, which ends with the end of the turn.
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        for turn, (start, stop) in zip(answers, runs_of(mask), strict=True):
            assert ids[stop - 1] == end
            assert turn["content"].strip() in tokenizer.decode(ids[start : stop - 1])


@style
def test_a_run_reads_what_transformers_gives(opened: Opened, tmp_path: Path, style: str) -> None:
    tokenizer = tokenizer_of(style)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    records = write_chats(tmp_path / "chats.jsonl", 40, tools=True)
    data = opened(tmp_path / "chats.jsonl", tokenizer=str(tmp_path / "tokenizer"))
    ids, mask = stored(tmp_path)
    expected = [by_transformers(tokenizer, record["messages"], TOOLS) for record in records]
    assert ids == [chat[0] for chat in expected]  # no second end token either
    assert mask == [chat[1] for chat in expected]
    within = (sum(each[: data.train.seq_len]) for each in mask)  # the rest is cut
    share = sum(within) / sum(map(len, mask))
    assert f"({share:.1%}) are learned" in data.summary()[0]
    batch = data.train.batch(0, data.train.samples)
    assert (batch.labels != -100).sum() == data.train.targets_in(0, data.train.samples)
    assert 0 < (batch.labels != -100).sum() < batch.labels.numel()
    assert batch.position_ids is not None  # conversations do not see each other


@pytest.fixture
def opened(opened: Opened) -> Opened:
    return partial(opened, seq_len=512)


def stored(tmp_path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids and the learned tokens of each document in the cache."""
    (folder,) = (tmp_path / "cache").glob("tokens-????????????????")
    tokens, masks = IndexedTokens(folder / "tokens"), load_masks(folder / "masks.npy")
    places = np.arange(len(tokens.ids))
    learned = 1 - masks.at(places)
    (starts,) = tokens.starts()
    ids = np.split(tokens.ids.block(0, len(tokens.ids)), starts[1:-1])
    return [run.tolist() for run in ids], [run.tolist() for run in np.split(learned, starts[1:-1])]


@style
@pytest.mark.parametrize("has_marks", [True, False])
def test_the_last_turn_alone_or_all_are_learned(style: str, has_marks: bool) -> None:
    tokenizer = tokenizer_of(style)
    masked = tokenizer if has_marks else without_marks(tokenizer)
    for turns in chats(20, tools=True):
        ids, mask = by_transformers(tokenizer, turns, TOOLS)
        first, last = runs_of(mask)[-1]
        expected = [int(first <= i < last) for i in range(len(ids))]
        assert encoded(masked, Chat(turns, TOOLS), "last") == (ids, expected)
        assert encoded(masked, Chat(turns, TOOLS), "all") == (ids, [1] * len(ids))


@style
def test_generation_ends_with_a_turn(style: str) -> None:
    ids = SpecialIds.of(tokenizer_of(style))
    end = tokenizer_of(style).convert_tokens_to_ids(STYLES[style].end)
    after = ids.in_place_of({"eos_token_id": None})["eos_token_id"]
    assert after == (ids.eos if ids.eos == end else [ids.eos, end])
    plain = tokenizer_of(style)
    plain.chat_template = None
    assert SpecialIds.of(plain).in_place_of({})["eos_token_id"] == ids.eos


def learned_text(tokenizer: PreTrainedTokenizerFast, chat: Chat, learn: str = "assistant") -> str:
    ids, mask = encoded(tokenizer, chat, learn)
    return tokenizer.decode([token for token, is_own in zip(ids, mask, strict=True) if is_own])


def thinking(text: str, looks: str = "false") -> tuple[str, list[dict[str, Any]]]:
    """Return a template that looks into texts and writes only the last thoughts; and turns."""
    begin = "{%- for m in messages %}"
    looking = f"{{%- set content = m.content %}}{{{{ '*' if {looks} else '' }}}}"
    turn = {"role": "assistant", "content": f"<think>so</think>{text}"}
    user = {"role": "user", "content": "ok ok"}
    return TEMPLATES["thinking"].replace(begin, begin + looking), [user, turn, user, turn]


THOUGHT = "yes<|im_end|><think>so</think>yes<|im_end|>"
TEXTS = {
    "rewritten turns": (*thinking("yes"), THOUGHT),
    "looks at ends": (*thinking("yes", "content.endswith('ok')"), THOUGHT),
    "looks at starts": (*thinking("yes", "content.startswith('ok')"), THOUGHT),
    "a turn of tags": (*thinking("<safe>"), "<safe><|im_end|><think>so</think><safe><|im_end|>"),
    **{
        name: ("".join(TEMPLATES[part] for part in parts.split()), turns, learned)
        for name, (parts, turns, learned) in TABLES["written"].items()
    },
    # Arguments are given as an object, or as text where the template would quote, reject or write
    # it as Python.
    **{
        form: (
            CALLS.replace("ARGUMENTS", f"call.function.arguments{form}"),
            CALLED,
            TABLES["added"],
        )
        for form in (" | tojson", "", " | string")
    },
}


@pytest.mark.parametrize("name", TEXTS)
def test_turns_are_learned_as_a_template_writes_them(name: str) -> None:
    template, turns, learned = TEXTS[name]
    tokenizer = tokenizer_of("chatml", template)
    assert learned_text(tokenizer, Chat(turns)) == learned
    ids, _ = encoded(tokenizer, Chat(turns))
    assert tokenizer.decode(ids).rstrip().endswith("<|im_end|>")  # it ends the document


def test_turn_without_generation_prompt_is_rejected() -> None:
    template, turns = thinking("yes")
    assert learned_text(tokenizer_of("chatml", template), Chat(turns), "last") == (
        "<think>so</think>yes<|im_end|>"
    )
    other = template.replace("{{- '<|im_start|>assistant", "{{- '<|bot|>")
    with pytest.raises(ValueError, match="does not begin with its generation prompt"):
        encoded(tokenizer_of("chatml", other), Chat(turns[:2]))


@pytest.mark.parametrize(("text", "other", "size"), TABLES["prefixes"])
def test_common_prefix_ends_between_tokens(text: str, other: str, size: int) -> None:
    finder = TurnFinder(mock.Mock(**{"text.return_value": ""}), ["<end>", "<ending>"])
    assert finder.same(text, other) == finder.same(other, text) == size


NAMED = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")


@pytest.mark.parametrize(
    ("template", "notes"),
    [
        (
            TEMPLATES["thinking"].replace("m.content }}", "m.content | upper }}"),
            [("keys", "name"), ("turns", "assistant turns whose text the template changes")],
        ),
        (NAMED, [("keys", "name")]),
        (
            (BLOCKS + PROMPT).replace(
                "+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}<end>"
            ),
            [("keys", "name"), ("turns", "assistant turns without an end token")],
        ),
        (NAMED.replace("m.role +", "(m.name or m.role) +", 1), []),
    ],
)
def test_texts_and_keys_that_a_template_alters_are_counted(template: str, notes: object) -> None:
    encoder = ChatEncoder(tokenizer_of("chatml", template), "assistant")
    assert encoder.render(Chat([{**USER, "name": "Bo"}, BOT])).notes == notes


def test_turns_that_a_row_marks_are_read_but_not_learned() -> None:
    said = [{"role": "assistant", "content": word} for word in ("one", "two", "three")]
    messages = [message for turn in said for message in (USER, turn)]
    for masked in (tokenizer_of("chatml"), without_marks(tokenizer_of("chatml"))):
        chat = Chat(messages, unlearned=frozenset({1, 5}))
        assert learned_text(masked, chat) == "two<|im_end|>"
        everything = masked.apply_chat_template(messages, tokenize=False)
        assert learned_text(masked, chat, "all") == re.sub("(one|three)<.im_end.>", "", everything)
        assert learned_text(masked, Chat(messages, unlearned=frozenset({5})), "last") == ""
        assert learned_text(masked, Chat(messages, prompt=4)) == "three<|im_end|>"
        assert learned_text(masked, Chat(messages, prompt=4), "all") == everything


@pytest.mark.parametrize("order", TABLES["orders"])
@pytest.mark.parametrize("has_marks", [True, False])
def test_the_template_decides_the_order_of_roles(order: str, has_marks: bool) -> None:
    tokenizer = tokenizer_of("chatml")
    turns = [turn_of(message) for message in TABLES["orders"][order]]
    chat = chat_of(turns)
    expected = by_transformers(tokenizer, chat.messages, None)
    assert encoded(tokenizer if has_marks else without_marks(tokenizer), chat) == expected


def test_values_of_a_row_come_before_those_of_the_run(
    opened: Opened, tmp_path: Path, write_jsonl: Written, chatml_dir: str
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text((TEMPLATES["variables"] + CALLS).replace("ARGUMENTS", "''"))
    turns = [USER, BOT]
    rows = ({"messages": turns, "chat_template_kwargs": row} for row in TABLES["of_rows"])
    path = write_jsonl(*rows)
    options = {"tokenizer": chatml_dir, "template": str(own), "held_out": 0}
    data = opened(path, **options, template_values={"enable_thinking": False})
    texts = [data.tokenizer.decode(ids) for ids in stored(tmp_path)[0]]
    assert [text.partition("1<")[0] for text in texts] == ["brief ", "rain ", "brief "]
    note = "the chat template also reads xml_tools (2): not given (data.template_values)"
    assert note in data.summary()[0]
    assert "left out of the rows: columns chat_template_kwargs.think (1)" in data.summary()[0]
    assert data.fingerprint != opened(path, **options).fingerprint


def test_unread_value_is_refused(refused: Refused, write_jsonl: Written, chatml_dir: str) -> None:
    path = write_jsonl({"messages": [USER, BOT]})
    (problem,) = refused(path, tokenizer=chatml_dir, template_values={"think": True})
    assert problem.startswith("data.template_values names think, which the chat template of ")
    assert problem.endswith(" does not read: remove it")


def test_content_dropped_by_a_template_is_counted_and_reported(
    opened: Opened, tmp_path: Path, write_jsonl: Written, chatml_dir: str
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(CALLS.replace("{% for call in m.tool_calls or [] %}", "{% for call in [] %}"))
    answer = {**BOT, "reasoning": "hm", "score": 3}
    turns = [*CALLED, {"role": "tool", "content": "1"}, answer]
    row = {"messages": turns, "tools": TOOLS, "rejected": "no", "id": None}
    path = write_jsonl(*(row for _ in range(12)))
    options = {"tokenizer": chatml_dir, "template": str(own)}
    for _ in range(2):  # the second start reads the cache
        data = opened(path, **options)
        (event,) = (event for event in data.events() if event["kind"] == "left_out_of_rows")
        assert event["counts"] == TABLES["left_out"]
        text = "columns rejected (12), keys of turns score (12), 12 assistant turns rendered"
        assert text in data.summary()[0]
    ids, mask = stored(tmp_path)
    pairs = zip(ids, mask, strict=True)
    texts = [data.tokenizer.decode(np.array(row)[np.array(by) > 0]) for row, by in pairs]
    assert texts == ["b.<|im_end|>"] * 12


def test_template_writes_the_run_date(opened: Opened, tmp_path: Path, write_jsonl: Written) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = CLOCK + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_jsonl(*({"messages": [USER, BOT]} for _ in range(20)))
    options = {"tokenizer": str(tmp_path / "tokenizer")}
    first = opened(path, **options, date="2026-01-31")
    text = first.tokenizer.decode(stored(tmp_path)[0][0])
    assert "<|im_start|>system\n31 Jan 2026 00:00<|im_end|>" in text
    assert first.summary()[0].endswith("the chat template writes the date 2026-01-31 (data.date)")
    again = opened(path, **options, date="2026-01-31", cache_dir=str(tmp_path / "other"))
    later = opened(path, **options, date="2026-02-01")
    assert first.fingerprint == again.fingerprint != later.fingerprint
    plain = opened(path, **options, template="chatml", date="2026-01-31")
    other = opened(path, **options, template="chatml", date="2026-02-01")
    assert plain.fingerprint == other.fingerprint
    assert "date" not in "".join(event["kind"] for event in plain.events())


def test_turns_that_the_template_does_not_mark_are_refused() -> None:
    tokenizer = tokenizer_of("chatml", TEMPLATES["in_part"])
    encoded(tokenizer, Chat([USER, BOT]))
    with pytest.raises(ValueError, match="has assistant turns outside"):
        encoded(tokenizer, Chat([USER, BOT] * 2))


@style
def test_no_control_token_of_the_own_template_is_divided(style: str) -> None:
    assert divided_control_tokens(tokenizer_of(style), [Chat([USER, BOT])]) == {}


def test_control_tokens_are_found_behind_a_chat_that_is_skipped() -> None:
    marks = "<|im_start|><\uff5cA\uff5c>[INST]<|a><of_a>"
    tokenizer = tokenizer_of(
        "phi",
        "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
        f"{{% for m in messages %}}{marks}{{{{ m.content }}}}<|end|>{{% endfor %}}",
    )
    chats = [Chat([{**USER, "content": text}, BOT]) for text in ("no", "yes <|b|>")]
    assert "".join(divided_control_tokens(tokenizer, chats)) == marks


def test_separator_line_break_that_ends_an_answer_is_learned(tokenizer_dir: str) -> None:
    """A tokenizer without <|im_end|>: generation stops at the separator, or not at all."""
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = {"own": read_template("chatml")}
    with pytest.raises(ValueError, match=r"to the data\.template argument.* \['own'\]"):
        learned_text(tokenizer, Chat([USER, BOT]))
    set_template(tokenizer, "own")
    turns = [{"role": "user", "content": "ok?"}, {"role": "assistant", "content": "ok."}]
    learned = learned_text(tokenizer, Chat(turns))
    assert learned == f"ok.<|im_end|>\n{tokenizer.eos_token}"


def test_spaces_outside_a_tokenizers_spans_are_learned() -> None:
    plain, trimming = (tokenizer_of("chatml", TEMPLATES["bare"]) for _ in range(2))
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat = Chat([USER, {"role": "assistant", "content": "  b.  "}, USER, BOT])
    assert encoded(trimming, chat) == encoded(plain, chat)
    assert learned_text(trimming, chat) == "  b.  b.<|im_end|>"


def test_the_runs_tokenizer_carries_the_template(
    opened: Opened, refused: Refused, tmp_path: Path, write_jsonl: Written
) -> None:
    chat = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that."}]
    path = write_jsonl(*({"messages": chat * 2} for _ in range(20)))
    pairs = write_jsonl(*[{"prompt": "what? ", "completion": "that."}] * 20, name="b.jsonl")
    note, _ = opened(pairs, template="chatml", eval_path=str(pairs), held_out=0.02).warnings()
    assert """'data.columns={question="prompt", answer="completion"}' reads them""" in note
    assert "no chat template: set data.template=chatml" in refused(path)[0]
    assert re.search("template is 'alpaca': .* chatml, gemma", refused(path, template="alpaca")[0])
    for name in ("chatlm", "ChatML"):
        assert "did you mean chatml?" in refused(path, template=name)[0]
    data = opened(path, template="chatml")
    (event,) = (event for event in data.events() if event["kind"] == "divided_control_tokens")
    assert "<|im_start|> (" in event["message"]
    assert event["message"] in data.warnings()
    assert ": 20 assistant turns are learned without a token that ends them" in data.warnings()[0]
    assert "left out" not in data.summary()[0]
    assert "name a tokenizer with these tokens in data.tokenizer" in event["message"]
    data.tokenizer.save_pretrained(tmp_path / "run")
    again = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert "<|im_start|>" in again.apply_chat_template(chat, tokenize=False)
    # Another template or learned share is other data; equal ones are the same.
    mine = tmp_path / "mine.jinja"
    mine.write_text(again.chat_template)
    same = opened(path, template=str(mine))
    assert same.fingerprint == data.fingerprint
    mine.write_text(again.chat_template.replace("im_end", "im_over"))
    others = [opened(path, template=str(mine)), opened(path, template="chatml", learn="all")]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 3


# TOML cannot hold a lone surrogate.
HALF_A_CHARACTER = {"name": "f", "arguments": {"a": "\ud800"}}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        *TABLES["refused"],
        (
            [USER, {"role": "assistant", "content": "b.", "tool_calls": [HALF_A_CHARACTER]}],
            "surrogates not allowed",
        ),
    ],
)
def test_bad_conversations_are_one_line_with_a_count(
    refused: Refused, tmp_path: Path, write_jsonl: Written, turns: object, message: str
) -> None:
    good = {"messages": [{"role": "system", "content": "s"}, USER, BOT]}
    path = write_jsonl(good, *({"messages": turns} for _ in range(30)), good)
    tokenizer = tokenizer_of("chatml")
    if turns == [USER, BOT]:
        tokenizer.chat_template = TEMPLATES["refusing"]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (problem,) = refused(path, tokenizer=str(tmp_path / "tokenizer"))
    assert problem.startswith(f"data.path: {path}:2: ")
    assert message in problem
    assert "(30 of 32 lines read; this is the first)" in problem
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.suffix != ".lock"]


def test_a_template_that_cannot_be_masked_is_named(
    refused: Refused, tmp_path: Path, write_jsonl: Written, chatml_dir: str
) -> None:
    """It writes all of the assistant's text after all questions."""
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATES["apart"])
    path = write_jsonl({"messages": [USER, BOT, USER, BOT]})
    (problem,) = refused(path, tokenizer=chatml_dir, template=str(own))
    assert f"exactly: the chat template of {own} writes an" in problem
