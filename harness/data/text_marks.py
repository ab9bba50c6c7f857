"""Marks within the texts of a conversation: words that say where a template has written a text.

A template copies a mark with the text around it. It stands behind the last letter of a text, or the
first, and outside of tags: templates which trim a text, or look for a tag, make the same of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from harness.files.turns import ASSISTANT, THOUGHT, Message

SAID, THOUGHT_OF, NAME, ARGUMENT = "c", "t", "f", "a"
"""Kinds of texts: what is said, what was thought, and of each call its name and an argument."""
Mark = tuple[str, int]
"""A kind, and the number of the call."""
_THOUGHT_ENDS = re.compile(r"</think(?:ing)?>|</thought>|</reasoning>|\[/THINK\]")
_TAGS = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z_]+\]")
_LETTER, _SIGN = re.compile(r"\w"), re.compile(r"\S")
_LAST_LETTER, _LAST_SIGN = re.compile(r".*\w", re.DOTALL), re.compile(r".*\S", re.DOTALL)


@dataclass(frozen=True)
class Placed:
    """A text, and the places in it of each message's marks."""

    text: str
    places: Mapping[int, Mapping[Mark, int]]

    def of(self, message: int) -> Mapping[Mark, int]:
        """Return the places of a message's marks."""
        return self.places.get(message, {})


def last_common(one: Placed, other: Placed, message: int) -> tuple[int, int] | None:
    """Return the places in two texts of a message's last mark that both have; None without."""
    places = one.of(message)
    for mark in sorted(places, key=lambda mark: places[mark], reverse=True):
        if (place := other.of(message).get(mark)) is not None:
            return places[mark], place
    return None


class Marks:
    """The marks of one conversation, each a word that its text does not hold."""

    def __init__(self, text: str) -> None:
        stem = next(stem for n in count() if (stem := f"Qz{n}Kx") not in text)
        self._stem, self._mark = stem, re.compile(rf"{stem}(\d+)([a-z])(\d+)z")

    def put(
        self, messages: Sequence[Message], kinds: str, *, at_begin: bool = False
    ) -> list[Message]:
        """Return messages with a mark in each of their texts of some kinds; `at_begin`: behind the
        first letter.
        """
        numbers: dict[tuple[str, str], int] = {}
        marked = []
        for place, message in enumerate(messages):
            is_own = message["role"] == ASSISTANT
            # Templates compare messages: those that were equal stay equal.
            key = (message["role"], str(place) if is_own else message["content"])
            number = numbers.setdefault(key, place)
            put = _in_assistants if is_own else _in_others
            mark = partial(_with_mark, f"{self._stem}{number}", at_begin)
            marked.append(put(message, kinds, mark))
        return marked

    def take(self, written: str, messages: Sequence[Message]) -> Placed:
        """Return what a template wrote of marked messages without the marks, with their places.

        Raises ValueError if equal messages are not written as often as they are said.
        """
        places: dict[int, list[tuple[Mark, int]]] = {}
        removed, parts, at = 0, [], 0
        for mark in self._mark.finditer(written):
            number, kind = int(mark[1]), (mark[2], int(mark[3]))
            places.setdefault(number, []).append((kind, mark.start() - removed))
            parts.append(written[at : mark.start()])
            at, removed = mark.end(), removed + len(mark[0])
        text = "".join([*parts, written[at:]])
        return Placed(text, self._by_message(messages, places))

    def in_message(self, message: Message) -> set[Mark]:
        """Return the marks in a message."""
        texts = _texts_of(message)
        return {(mark[2], int(mark[3])) for text in texts for mark in self._mark.finditer(text)}

    def _by_message(
        self, messages: Sequence[Message], places: dict[int, list[tuple[Mark, int]]]
    ) -> dict[int, dict[Mark, int]]:
        """Return the first place of each mark by message."""
        sharing: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            if found := self._mark.search(" ".join(_texts_of(message))):
                sharing.setdefault(int(found[1]), []).append(place)
        by_message: dict[int, dict[Mark, int]] = {}
        for number, of in sharing.items():
            marks = places.get(number, [])
            if len(of) == 1:
                for kind, place in reversed(marks):
                    by_message.setdefault(of[0], {})[kind] = place
            elif len(marks) == len(of):
                by_message |= {
                    message: {kind: place} for message, (kind, place) in zip(of, marks, strict=True)
                }
            elif marks:
                raise ValueError("writes equal turns in other numbers than they are said")
        return by_message


Put = Callable[..., str]
"""Return a text with a mark of a kind, for which `call` is a number."""


def _in_others(message: Message, kinds: str, put: Put) -> Message:
    if SAID not in kinds:
        return message
    return {**message, "content": put(message["content"], SAID)}


def _in_assistants(message: Message, kinds: str, put: Put) -> Message:
    made, content = dict(message), message["content"]
    ends = [end.end() for end in _THOUGHT_ENDS.finditer(content)]
    thought, said = (content[: ends[-1]], content[ends[-1] :]) if ends else ("", content)
    if THOUGHT_OF in kinds:
        thought = put(thought, THOUGHT_OF)
        if THOUGHT in message:
            made[THOUGHT] = put(message[THOUGHT], THOUGHT_OF)
    made["content"] = thought + (put(said, SAID) if SAID in kinds else said)
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_in_call(call, kinds, put, n) for n, call in enumerate(calls)]
    return made


def _in_call(call: Message, kinds: str, put: Put, number: int) -> Message:
    function = dict(call["function"])
    arguments = dict(function["arguments"])
    if NAME in kinds:
        function["name"] = put(function["name"], NAME, number)
    key = next((key for key, value in arguments.items() if isinstance(value, str) and value), None)
    if ARGUMENT in kinds and key is not None:
        arguments[key] = put(arguments[key], ARGUMENT, number)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_mark(stem: str, at_begin: bool, text: str, kind: str, call: int = 0) -> str:
    """Return a text with a mark behind its last letter outside of tags, or its last sign; one that
    is nothing but tags has the mark outside of them.
    """
    ends = [0, *(end for tag in _TAGS.finditer(text) for end in tag.span()), len(text)]
    outside = [*zip(ends[::2], ends[1::2], strict=True)]
    for first, last in ((_LETTER, _LAST_LETTER), (_SIGN, _LAST_SIGN)):
        for start, stop in outside if at_begin else reversed(outside):
            found = first.search(text, start, stop) if at_begin else last.match(text, start, stop)
            if found:
                return f"{text[: found.end()]}{stem}{kind}{call}z{text[found.end() :]}"
    if not text.strip():
        return text
    place = len(text) - len(text.lstrip()) if at_begin else len(text.rstrip())
    return f"{text[:place]}{stem}{kind}{call}z{text[place:]}"


def _texts_of(message: Message) -> list[str]:
    texts = [message["content"], message.get(THOUGHT) or ""]
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        values = arguments.values() if isinstance(arguments, dict) else [arguments]
        texts += [call["function"]["name"], *(text for text in values if isinstance(text, str))]
    return texts
