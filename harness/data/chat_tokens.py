"""Conversations as token ids, with the spans of tokens that are trained on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.data.rendering import Arguments, ChatTemplate, is_written_as_python, with_arguments
from harness.data.tokenizer import encode_with_offsets, with_full_spans
from harness.data.turn_places import WITHOUT_END, NotFound, Place, TurnFinder
from harness.errors import ConfigError
from harness.files.chat import NO_TEMPLATE, Chat
from harness.files.notes import Note
from harness.files.pieces import Spans
from harness.files.turns import THOUGHT

# Tokens in brackets: with bars, as names in capitals, and others, which may also be tags of a text.
_CONTROL = re.compile(r"<[|\uff5c][^<>\n]{1,64}>|<[^<>\s]{1,64}[|\uff5c]>|\[/?[A-Z][A-Z_]+\]")
_TAG = re.compile(r"<([^<>\s]{1,64})>")
# Keys never reported as unread: every template reads them, or many templates have no use for them.
_COMMON_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "id", THOUGHT})


@dataclass(frozen=True)
class Encoded:
    """The token ids of a document or piece, and the loss mask over them."""

    ids: list[int]
    learned: Spans
    """Spans of tokens that are trained on, in order."""
    notes: Sequence[Note] = ()
    """Content of the row that is not trained on."""
    chosen: int = 0
    """Of a preference pair: number of tokens of its chosen side, which comes first."""


@dataclass(frozen=True)
class Rendered:
    """The rendered text of a conversation."""

    text: str
    learned: Spans
    """Spans of characters that are trained on, in order."""
    notes: Sequence[Note] = ()


def divided_control_tokens(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[Chat],
    values: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Return the control tokens that the tokenizer does not know, each with the number of tokens it
    is split into. They are searched for in the first conversation that the template accepts
    (data.bad_rows may skip others). `values`: data.template_values.
    """
    encoder, text, said, tags = None, "", "", ""
    for chat in chats:
        encoder = encoder or ChatEncoder(tokenizer, "all", values=values)
        with contextlib.suppress(ValueError):
            text, said = encoder.render(chat).text, str(chat.messages)
            tags = "" if chat.tools else text  # a list of tools comes with a text about tags
            break
    pairs = {name for name in _TAG.findall(tags) if f"</{name}>" in tags}
    lone = [f"<{name}>" for name in _TAG.findall(tags) if name.strip("/") not in pairs]
    names = [name for name in [*_CONTROL.findall(text), *lone] if name not in said]
    pieces = {name: len(tokenizer.encode(name, add_special_tokens=False)) for name in names}
    return {name: count for name, count in pieces.items() if count > 1}


class ChatEncoder:
    """Encodes conversations with a tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        learn: str = "assistant",
        day: str | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """`day` is the date that the template writes; None: today. `values`: its variables."""
        self._tokenizer, self._learn = tokenizer, learn
        if not tokenizer.chat_template:
            raise ConfigError(NO_TEMPLATE)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"data.tokenizer: {type(tokenizer).__name__} gives no character offsets, so the "
                "assistant's turns of a conversation cannot be located: use one with a "
                "tokenizer.json"
            )
        self._spans = with_full_spans(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._template = ChatTemplate(tokenizer, day, values)
        self._require_read(values or {})
        self._finder = TurnFinder(self._template, [token.content for token in added.values()])
        self._special = frozenset(added)

    def _require_read(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a value of data.template_values that the template does not read."""
        if not values:
            return
        read = self._template.variables(Chat([])) | self._template.variables(Chat([], tools=[{}]))
        if unread := sorted(values.keys() - read):
            instead = f"it reads {', '.join(sorted(read))}" if read else "remove it"
            raise ConfigError(
                f"data.template_values names {unread[0]}, which the {self._template.name} does not "
                f"read: {instead}"
            )

    def render(self, chat: Chat) -> Rendered:
        """Return a conversation's text and the spans of it that are trained on.

        Raises ValueError if the template rejects the conversation or exact masking is impossible.
        """
        form, text = self._text(chat)
        notes: list[Note] = [("keys", key) for key in self._unread_keys(chat, text, form)]
        notes += [("variables", name) for name in self._template.not_given(chat)]
        if chat.tools and self._is_text_of(replace(chat, tools=None), text, form):
            notes.append(("turns", _WITHOUT_TOOLS))
        read = {*self._template.variables(chat), *self._tokenizer.special_tokens_map}
        unread = sorted(chat.values.keys() - read)
        notes += [("columns", f"chat_template_kwargs.{key}") for key in unread]
        turns, places = self._finder.turns_of(chat, text, form), Places()
        notes += [("turns", note) for note in turns.unwritten()]
        needed = {*self._needed(chat)}
        for number in chat.turns():
            if number not in needed:  # locating a turn takes two renderings
                notes += [("turns", note) for note in turns.lacks(number)]
                continue
            try:
                places[number] = turns.place(number)
                notes += [("turns", note) for note in places[number].lacks]
            except NotFound as error:
                places.missing[number] = error
        turns_learned = self._learned(chat, text, form, places)
        for start, stop in [spans[-1] for spans in turns_learned if self._learn != "all"]:
            if text[stop:].strip() and not self._finder.ends_with_token(text[start:stop].rstrip()):
                notes.append(("turns", WITHOUT_END))
        return Rendered(text, [span for spans in turns_learned for span in spans], notes)

    def _is_text_of(self, chat: Chat, text: str, form: Arguments) -> bool:
        """Return True if the template writes `text` for a conversation, too; False if it rejects
        it.
        """
        try:
            return text == self._template.text(with_arguments(chat.messages, form), chat)
        except ValueError:
            return False

    def _needed(self, chat: Chat) -> Iterable[int]:
        """Return the numbers of the turns that must be located to know what is trained on."""
        if self._learn == "all":
            return chat.unlearned
        return chat.turns() if self._template.marks_turns(chat) else self._chosen(chat)

    def _chosen(self, chat: Chat) -> list[int]:
        """Return the numbers of the turns that are trained on, unless data.learn is "all"."""
        turns = chat.turns()
        candidates = turns[-1:] if self._learn == "last" else turns
        return [number for number in candidates if number in {*chat.learned()}]

    def _text(self, chat: Chat) -> tuple[Arguments, str]:
        """Return a conversation's text and the form in which the template takes call arguments: as
        an object, or as JSON text if it rejects objects or writes them as Python would.
        """
        try:
            text = self._template.text(chat.messages, chat)
            problem = None
        except ValueError as error:
            problem = error
        has_calls = any(message.get("tool_calls") for message in chat.messages)
        if has_calls and (problem or is_written_as_python(text, chat.messages)):
            try:
                messages = with_arguments(chat.messages, "text")
                return "text", self._template.text(messages, chat)
            except ValueError:
                pass
        if problem is not None:
            raise problem
        return "object", text

    def _learned(self, chat: Chat, text: str, form: Arguments, places: Places) -> list[Spans]:
        """Return the spans that are trained on, by turn if turns are. Raises ValueError."""
        if self._learn == "all":
            return [_without([(0, len(text))], places.found(chat.unlearned, ""))]
        turns, chosen = chat.turns(), self._chosen(chat)
        if not self._template.marks_turns(chat):
            is_way_out = self._learn == "assistant" and turns[-1] in places
            other = "data.learn=last, or " if is_way_out else ""
            own = places.found(chosen, f": set {other}data.template to one with {_BLOCK}")
            return [[(place.start, place.stop)] for place in own if place.is_written]
        _, marked = self._template.marked(with_arguments(chat.messages, form), chat)
        marked = [(start, stop) for start, stop in marked if start < stop]
        if places.missing:
            return self._marked_alone(turns, marked, chosen, places)
        return self._marked_in(marked, chosen, places)

    def _marked_in(self, marked: Spans, chosen: Sequence[int], places: Places) -> list[Spans]:
        """Return what {% generation %} marks of the chosen turns, without their role markers."""
        learned: list[Spans] = []
        for number, place in places.items():
            cut = [(max(start, place.start), min(stop, place.stop)) for start, stop in marked]
            own = [(start, stop) for start, stop in cut if start < stop]
            if place.is_written and not own:
                raise ValueError(self._unmarked)
            learned += [own] if own and number in chosen else []
        return learned

    def _marked_alone(
        self, turns: list[int], marked: Spans, chosen: list[int], places: Places
    ) -> list[Spans]:
        """Return the marked parts of the chosen turns if some turns could not be located: one part
        per turn, or all parts if all turns are chosen. Raises ValueError otherwise.
        """
        if len(marked) < len(turns):
            raise ValueError(self._unmarked)
        if len(marked) == len(turns):
            return [[span] for n, span in zip(turns, marked, strict=True) if n in chosen]
        if chosen != turns:
            places.found(turns, "")
        return [marked]

    @property
    def _unmarked(self) -> str:
        return f"has assistant turns outside {_BLOCK} of the {self._template.name}"

    def _unread_keys(self, chat: Chat, text: str, form: Arguments) -> list[str]:
        """Return the keys of turns that have a value but do not change the text."""
        keys = [
            key
            for message in chat.messages
            for key, value in message.items()
            if key not in _COMMON_KEYS and value and (key, message["role"]) != ("name", "tool")
        ]
        unread = {key for key in {*keys} if not self._is_read(key, chat, text, form)}
        return [key for key in keys if key in unread]

    def _is_read(self, key: str, chat: Chat, text: str, form: Arguments) -> bool:
        """Return True if the text changes without a key that the template's source mentions."""
        if not self._template.names(key, chat):
            return False
        messages = [
            {k: value for k, value in message.items() if k != key} for message in chat.messages
        ]
        return not self._is_text_of(replace(chat, messages=messages), text, form)

    def encode(self, chats: Sequence[Rendered]) -> Iterator[Encoded]:
        """Yield the ids of rendered texts, as apply_chat_template returns them.

        The separator is appended to a text that does not end with a special token. If the text ends
        with trained tokens, the separator and the white space before it are trained on too: a model
        that has not learned to write that white space never reaches the separator.
        """
        encoded = encode_with_offsets(self._spans, [chat.text for chat in chats])
        for (ids, offsets), chat in zip(encoded, chats, strict=True):
            learned = tokens_of(offsets, chat.learned)
            if not self._is_closed(ids, offsets, chat.text):
                ids.append(self._tokenizer.eos_token_id)
                if chat.learned and chat.learned[-1][1] >= len(chat.text.rstrip()):
                    learned[-1] = (learned[-1][0], len(ids))
            yield Encoded(ids, learned, chat.notes)

    def _is_closed(self, ids: list[int], offsets: NDArray[np.int64], text: str) -> bool:
        """Return True if only white space follows the last special token, and turns end with
        one.
        """
        if not self._finder.closes_turns:
            return bool(ids) and ids[-1] == self._tokenizer.eos_token_id
        last = next((n for n in range(len(ids) - 1, -1, -1) if ids[n] in self._special), None)
        return last is not None and not text[int(offsets[last, 1]) :].strip()


_BLOCK = "{% generation %}"
_WITHOUT_TOOLS = "lists of tools that the template leaves out"


class Places(dict[int, Place]):
    """Spans of a conversation's turns, by turn number, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: dict[int, NotFound] = {}
        """Turns that could not be located, with the reason."""

    def found(self, numbers: Iterable[int], advice: str) -> list[Place]:
        """Return the spans of some turns. Raises ValueError if one could not be located."""
        numbers = [*numbers]
        if problems := [self.missing[number] for number in numbers if number in self.missing]:
            raise ValueError(f"cannot be masked exactly: {problems[0]}{advice}")
        return [self[number] for number in numbers]


def _without(spans: Spans, places: Sequence[Place]) -> Spans:
    """Return `spans` minus `places`."""
    for place in places:
        spans = [
            (start, stop)
            for first, last in spans
            for start, stop in ((first, min(last, place.start)), (max(first, place.stop), last))
            if start < stop
        ]
    return spans


def tokens_of(offsets: NDArray[np.int64], spans: Spans) -> Spans:
    """Return the token spans that cover character spans; `offsets` (tokens, 2) ascend."""
    places = np.array(spans, dtype=np.int64).reshape(-1, 2)
    firsts = np.searchsorted(offsets[:, 1], places[:, 0], side="right")
    lasts = np.searchsorted(offsets[:, 0], places[:, 1], side="left")
    return [(first, last) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
