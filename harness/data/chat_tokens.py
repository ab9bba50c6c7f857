"""Conversations as token ids, with the runs of tokens that are learned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from harness.errors import ConfigError, Unusable
from harness.files.chat import ASSISTANT, Chat, Message
from harness.files.paths import user_path
from harness.files.regular_file import read_regular

TEMPLATES = Path(__file__).with_name("templates")
_MOST_TEMPLATE_BYTES = 1 << 20
_CONTROL = re.compile(r"<\|[\w ]+\|>|<(?:start|end)_of_\w+>")
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")

_SOURCE = "chat_template_source"
"""Attribute of a tokenizer: what set_template was given."""

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Encoded:
    """The ids of a document or of a piece of one, and which of them are learned."""

    ids: list[int]
    learned: Spans
    """Runs of learned tokens, in order."""


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give a tokenizer, and so the run's copy and the export, a template by name or .jinja file.

    Raises ConfigError.
    """
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    path = (
        TEMPLATES / f"{template}.jinja"
        if template in names
        else user_path("data.template", template)
    )
    try:
        tokenizer.chat_template = read_regular(path, _MOST_TEMPLATE_BYTES, links=True).decode()
    except (OSError, Unusable, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.template: cannot read {template}: {error}; it must be a .jinja file or one of "
            f"{', '.join(names)}"
        ) from error
    setattr(tokenizer, _SOURCE, template)


def divided_control_tokens(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> dict[str, int]:
    """Return the control tokens that the template writes in a conversation and that are no token of
    the tokenizer, each with the number of pieces that stand for it. Raises ValueError.
    """
    text, _ = ChatEncoder(tokenizer, "all").render(chat)
    names = dict.fromkeys(_CONTROL.findall(text))
    pieces = {name: len(tokenizer.encode(name, add_special_tokens=False)) for name in names}
    return {name: count for name, count in pieces.items() if count > 1}


class ChatEncoder:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, learn: str) -> None:
        self._tokenizer, self._learn = tokenizer, learn
        self._name = f"chat template of {getattr(tokenizer, _SOURCE, tokenizer.name_or_path)}"
        if not tokenizer.chat_template:
            raise ConfigError(
                "data.path holds conversations, but the tokenizer has no chat template: set "
                "data.template=chatml, or another name or .jinja file"
            )
        if not tokenizer.is_fast:
            raise ConfigError(
                f"data.tokenizer: {type(tokenizer).__name__} does not say which characters a token "
                "stands for, so the assistant's turns of a conversation cannot be told: it needs a "
                "tokenizer.json"
            )
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        added = tokenizer.added_tokens_decoder.values()
        self._ends = tuple(token.content for token in added)
        self._special = frozenset(tokenizer.added_tokens_decoder)

    def render(self, chat: Chat) -> tuple[str, Spans]:
        """Return a conversation's text and the (start, end) of each learned part of it.

        Raises ValueError with the problem: the template refuses it, or cannot be masked exactly.
        """
        template = self._tokenizer.get_chat_template(tools=chat.tools)
        if self._learn == "all":
            text, _ = self._text(chat, template)
            return text, [(0, len(text))]
        turns = [n for n, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        if _MARKS_TURNS.search(template) is None:
            text, _ = self._text(chat, template)
            learned = turns[-1:] if self._learn == "last" else turns
            return text, [self._turn(chat, template, text, turn) for turn in learned]
        text, spans = self._text(chat, template, marks=True)
        if sum(start < stop for start, stop in spans) < len(turns):
            raise ValueError(f"has assistant turns outside {{% generation %}} of the {self._name}")
        if self._learn == "last":
            before = Chat(chat.messages[: turns[-1]], chat.tools)
            spans = spans[len(self._text(before, template, marks=True)[1]) :]
        return text, [(start, stop) for start, stop in spans if start < stop]

    def _turn(self, chat: Chat, template: str, text: str, turn: int) -> tuple[int, int]:
        """Return the place of an assistant turn: what the prompt before it does not hold."""
        before, _ = self._text(Chat(chat.messages[:turn], chat.tools), template, prompt=True)
        through, _ = self._text(Chat(chat.messages[: turn + 1], chat.tools), template)
        if not through.startswith(before):
            raise ValueError(
                f"cannot be masked exactly: the {self._name} writes an assistant turn that does "
                "not begin with its generation prompt" + _WAYS_OUT
            )
        if not text.startswith(through):
            raise ValueError(
                f"cannot be masked exactly: the {self._name} writes an earlier assistant turn "
                "differently when others follow (as one that drops earlier thinking)" + _WAYS_OUT
            )
        answer = through[len(before) :]
        if not answer.strip():
            raise ValueError(f"has an assistant turn of which the {self._name} writes nothing")
        ended = answer.rstrip()
        # Generation stops at the end of the turn: the line break behind it is the template's.
        return len(before), len(before) + len(ended if ended.endswith(self._ends) else answer)

    def _text(
        self, chat: Chat, template: str, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, Spans]:
        """Return what apply_chat_template renders, and its {% generation %} parts."""
        try:
            # Its types say that it returns text alone.
            texts, spans = render_jinja_template(  # type: ignore[str-unpack]
                conversations=[_without_none(chat.messages)],
                tools=chat.tools,  # type: ignore[arg-type]
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self._special_tokens,
            )
            texts[0].encode()  # a lone surrogate in a call of a tool is valid JSON and no text
        except Exception as error:  # a template may raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"is refused by the {self._name}: {problem[:300]}") from error
        return texts[0], list(spans[0]) if marks else []  # type: ignore[arg-type]

    def encode(self, texts: list[str], spans: list[Spans]) -> Iterator[Encoded]:
        """Yield the ids of rendered texts, as apply_chat_template gives them.

        Where a text does not end with a special token, the separator follows, and is learned.
        """
        if not texts:
            return
        encodings = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        columns = (encodings["input_ids"], encodings["offset_mapping"], texts, spans)
        for ids, offsets, text, of_text in zip(*columns, strict=True):
            learned = _tokens_of(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), of_text)
            if not self._is_closed(ids, offsets, text):
                ids.append(self._tokenizer.eos_token_id)
                learned.append((len(ids) - 1, len(ids)))
            yield Encoded(ids, learned)

    def _is_closed(self, ids: list[int], offsets: list[tuple[int, int]], text: str) -> bool:
        """Return True if nothing but white space follows the last special token."""
        last = next((n for n in range(len(ids) - 1, -1, -1) if ids[n] in self._special), None)
        return last is not None and not text[offsets[last][1] :].strip()


_WAYS_OUT = ": set data.learn=last, or data.template to one with {% generation %}"


def _tokens_of(offsets: NDArray[np.int64], spans: Spans) -> Spans:
    """Return the runs of tokens that hold spans of characters; offsets (tokens, 2) ascend."""
    places = np.array(spans, dtype=np.int64).reshape(-1, 2)
    firsts = np.searchsorted(offsets[:, 1], places[:, 0], side="right")
    lasts = np.searchsorted(offsets[:, 0], places[:, 1], side="left")
    return [(first, last) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _without_none(messages: list[Message]) -> list[Any]:
    """Return messages as apply_chat_template hands them to the template."""
    return [{key: value for key, value in m.items() if value is not None} for m in messages]
