"""Locates the assistant's turns in a rendered conversation, for any template.

The conversation is rendered a second time with marks in its texts (rendering.py). Without the marks
this rendering must equal the first, so each mark shows where its text is. A turn starts after what
a generation prompt adds to the text before it (without what no turn has, such as an empty thought),
and ends with what the template writes after the turn's own text. Both are taken from renderings of
the conversation up to that point and matched in the full text from the mark on, so changes before
the mark do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from harness.data.rendering import (
    ARGUMENT,
    NAME,
    SAID,
    THOUGHT_OF,
    Arguments,
    ChatTemplate,
    Marks,
    Placed,
    last_common,
    with_arguments,
)
from harness.files.chat import Chat
from harness.files.turns import ASSISTANT, Message

_KINDS = (SAID + THOUGHT_OF + NAME + ARGUMENT, SAID + THOUGHT_OF + NAME, SAID + THOUGHT_OF, SAID)
# A template may inspect a text and render it differently with a mark. Then another position is
# tried, and then fewer marks.
_MARKED = tuple((kinds, at_begin) for kinds in _KINDS for at_begin in (False, True))
_LAST_TAG = re.compile(r"(<\w{1,64}>|\[\w{1,64}\])\s*$")
_LINE_BREAK = re.compile("\n")
_TAG, _WORD = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,64}\]"), re.compile(r"\w")
_EMPTY_THOUGHT = re.compile(r"(?:<(\w{1,64})>\s*</\1>|\[(\w{1,64})\]\s*\[/\2\])\s*$")
_LONGEST_TOKEN = 64

WRITES_NOTHING = "assistant turns rendered empty (not learned)"
WITHOUT_CALLS = "assistant turns rendered without their tool calls (not learned)"
WITHOUT_SOME_CALLS = "assistant turns rendered without some of their tool calls"
WITHOUT_TEXT = "assistant turns whose text the template leaves out beside calls"
WITHOUT_THOUGHT = "assistant turns whose thoughts the template leaves out"
WITHOUT_END = "assistant turns without an end token"
OTHER_TEXT = "assistant turns whose text the template changes"


def _opened(text: str, following: str) -> str:
    """Return the tag at the end of a text that the text behind it closes, or ""."""
    tag = _LAST_TAG.search(text)
    closes = tag and f"{tag[1][0]}/{tag[1][1:]}" in following
    return tag[0] if tag and closes else ""


class NotFound(ValueError):
    """A turn that cannot be located; the message says why."""


@dataclass(frozen=True)
class Place:
    """The span of an assistant's turn in a rendered conversation."""

    start: int
    stop: int
    lacks: tuple[str, ...] = ()
    """Parts that the template leaves out, for notes."""
    is_written: bool = True
    """False if the template writes nothing of the turn, or none of its calls."""


class TurnFinder:
    """Locates turns in a template's output."""

    def __init__(self, template: ChatTemplate, tokens: Iterable[str]) -> None:
        """`tokens`: special tokens, such as the end of a turn."""
        self.template = template
        ordered = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.closes_turns = self._closes_turns()
        """True if a special token ends each turn, rather than the next role's marker."""

    def _closes_turns(self) -> bool:
        turns = [{"role": "user", "content": "why"}, {"role": ASSISTANT, "content": "therefore"}]
        try:
            text = self.template.text(turns, Chat([]))
        except ValueError:
            return True
        return self._tokens.search(text.rpartition("therefore")[2]) is not None

    def turns_of(self, chat: Chat, text: str, form: Arguments) -> Turns:
        """Return the turns of a conversation in its rendered `text`."""
        marks, tried = Marks(text), list[list[Message]]()
        for kinds, at_begin in _MARKED:
            marked = marks.put(chat.messages, kinds, at_begin=at_begin)
            if marked in tried:  # e.g. if there are no calls or thoughts
                continue
            tried.append(marked)
            messages = with_arguments(marked, form)
            try:
                whole = marks.take(self.template.text(messages, chat), messages)
            except ValueError:
                continue
            if whole.text == text:
                return Turns(self, chat, messages, whole, marks)
        return Turns(self, chat, with_arguments(chat.messages, form), Placed(text, {}), marks)

    def without_tokens(self, text: str) -> str:
        """Return a text without special tokens and surrounding white space."""
        return self._tokens.sub("", text).strip()

    def ends_with_token(self, text: str) -> bool:
        """Return True if a text ends with a special token."""
        first = max(0, len(text) - _LONGEST_TOKEN)
        return any(found.end() == len(text) for found in self._tokens.finditer(text, first))

    def token_at(self, text: str, place: int) -> int:
        """Return the end of the special token at a position; -1 if there is none."""
        found = self._tokens.match(text, place)
        return found.end() if found else -1

    def ends(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the special tokens and line breaks of a text."""
        yield from chain(self._tokens.finditer(text), _LINE_BREAK.finditer(text))

    def same(self, text: str, other: str) -> int:
        """Return the length of the common prefix of two texts, without part of a token."""
        pairs = zip(text, other, strict=False)
        size = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))
        for first in range(max(0, size - _LONGEST_TOKEN), size):
            if max(self.token_at(string, first) for string in (text, other)) > size:
                return first
        return size


@dataclass(frozen=True)
class Turns:
    """The turns of one rendered conversation."""

    finder: TurnFinder
    chat: Chat
    messages: list[Message]
    whole: Placed
    marks: Marks

    def unwritten(self) -> list[str]:
        """Return a note for each text of other roles that the template leaves out."""
        return [
            f"{message['role']} turns that the template leaves out"
            for number, message in enumerate(self.messages)
            if message["role"] != ASSISTANT
            and self.marks.in_message(message)
            and not self.whole.of(number)
        ]

    def lacks(self, number: int) -> tuple[str, ...]:
        """Return a note for each part of an assistant turn that the template leaves out."""
        return self._what_is_written(number)[0]

    def place(self, number: int) -> Place:
        """Return the span of an assistant turn. Raises NotFound if it cannot be located."""
        lacks, is_written = self._what_is_written(number)
        if not is_written:
            return Place(0, 0, lacks, is_written=False)
        start, name = self._start(number), self.finder.template.name
        if start is None:
            raise NotFound(
                f"the {name} writes an assistant turn that does not begin with its generation "
                "prompt"
            )
        stop = self._stop(number)
        if stop is None or not self._is_its(number, start, stop):
            raise NotFound(
                f"the {name} changes an earlier assistant turn when others follow, so that it "
                "cannot be located in the text"
            )
        text = self.whole.text[start:stop]
        if not self.finder.without_tokens(text):
            return Place(0, 0, (WRITES_NOTHING,), is_written=False)
        if not self._is_found(number, text):
            lacks = (*lacks, OTHER_TEXT)
        return Place(start, stop, lacks)

    def _what_is_written(self, number: int) -> tuple[tuple[str, ...], bool]:
        """Return notes on what the rendering lacks of a turn, and True if it has enough of it."""
        given = self.marks.in_message(self.messages[number])
        written = self.whole.of(number).keys()
        calls, there = (
            {n for kind, n in marks if kind in (NAME, ARGUMENT)} for marks in (given, written)
        )
        if given and not written:
            return (WRITES_NOTHING,), False
        if calls and not there:
            return (WITHOUT_CALLS,), False
        lacks = [WITHOUT_SOME_CALLS] if calls - there else []
        lacks += [WITHOUT_TEXT] if (SAID, 0) in given - written else []
        lacks += [WITHOUT_THOUGHT] if (THOUGHT_OF, 0) in given - written else []
        return tuple(lacks), True

    def _is_found(self, number: int, text: str) -> bool:
        """Return True if the turn has marks, or if `text` contains all of its words."""
        message = self.messages[number]
        words = [message["content"].rpartition("</think>")[2].strip()]
        words += [call["function"]["name"] for call in message.get("tool_calls", [])]
        return bool(self.marks.in_message(message)) or all(word in text for word in words)

    def _start(self, number: int) -> int | None:
        """Return the start of a turn: after the prompt, or after its role marker if the prompt goes
        on otherwise than the turn, for example with an empty thought. None if the turn has neither.
        """
        if number == 0:
            return self._start_of_first()
        prompt = self._of_first(number, prompt=True)
        place, in_prompt = self._before(number, prompt)
        behind = prompt.text[in_prompt:]
        if self.whole.text.startswith(behind, place):
            return place + len(behind)
        size = self._marker(number, behind, self.whole.text[place:])
        return None if size is None else place + size

    def _start_of_first(self) -> int | None:
        """Return the start of a turn that begins the conversation, or None: behind its role marker,
        which is what a prompt behind a user's turn has in common with it.
        """
        word, text = self.marks.stem, self.finder.template.text
        asked, said = ([{"role": role, "content": word}] for role in ("user", ASSISTANT))
        try:
            without, prompt = text(asked, self.chat), text(asked, self.chat, prompt=True)
            begin = text(said, self.chat).partition(word)[0]
        except ValueError:
            return None
        prompt = prompt[self.finder.same(without, prompt) :]
        ends = {len(prompt), *(found.end() for found in self.finder.ends(prompt))}
        is_marked = any(begin.endswith(prompt[:end]) for end in ends if end)
        return len(begin) if is_marked and self.whole.text.startswith(begin) else None

    def _marker(self, number: int, prompt: str, text: str) -> int | None:
        """Return the length of what a turn's `text` and its `prompt` have in common, up to the end
        of the role marker, which is also in front of a turn that has only an unknown word to say.
        """
        first, word = self.messages[:number], self.marks.stem
        turn = {"role": ASSISTANT, "content": word}
        try:
            plain = self.marks.take(self.finder.template.text([*first, turn], self.chat), first)
        except ValueError:
            return None
        without = self._of_first(number)
        begin = plain.text[self._before(number, plain)[1] :].partition(word)[0]
        earlier = without.text[self._before(number, without)[1] :]
        is_behind_result = number > 0 and self.messages[number - 1]["role"] == "tool"
        if is_behind_result and begin.strip() == earlier.strip() and text.startswith(earlier):
            return len(earlier)  # the turn goes on behind the result of its call
        added = prompt[self.finder.same(earlier, prompt) :]
        if added.strip() and begin.endswith(added) and text.startswith(begin):
            return len(begin)  # what precedes the prompt is otherwise if a turn follows
        size = self.finder.same(begin[: self.finder.same(begin, prompt)], text)
        if size < len(begin):
            size = max([0, *(found.end() for found in self.finder.ends(begin[:size]))])
        size -= len(_opened(begin[:size], text[size:]))
        return size if self._is_marker(begin, size, earlier, prompt) else None

    def _is_marker(self, begin: str, size: int, earlier: str, prompt: str) -> bool:
        """Return True if the first characters of what precedes a turn of one word hold the whole
        role marker; `earlier`: what is written without the turn and its prompt.
        """
        rest = begin[size:]
        if earlier == prompt:  # the prompt is written without being asked for, or there is none
            return not _EMPTY_THOUGHT.sub("", rest).strip()
        is_of_prompt = size > self.finder.same(earlier, prompt)
        return is_of_prompt and not _WORD.search(_TAG.sub("", self.finder.without_tokens(rest)))

    def _stop(self, number: int) -> int | None:
        """Return the end of a turn, including the token that ends it."""
        alone = self._of_first(number + 1)
        own = last_common(self.whole, alone, number)
        place, in_alone = own or self._before(number, alone)
        text, behind = self.whole.text[place:], alone.text[in_alone:]
        size = len(behind)
        if not text.startswith(behind):
            if own is None:
                return None
            size = self.finder.same(text, behind)
        ended = text[:size].rstrip()
        # Generation stops at the end of the turn; the line break after it belongs to the template.
        if self.finder.closes_turns and self.finder.ends_with_token(ended):
            return place + len(ended)
        # Otherwise the model must write the token that follows: the next role's marker.
        spaces = len(text) - len(text[size:].lstrip())
        token = self.finder.token_at(text, spaces)
        return place + (token if token > 0 else size)

    def _before(self, number: int, other: Placed) -> tuple[int, int]:
        """Return the places of the last mark before a turn, in the full text and in another
        rendering.
        """
        for earlier in range(number - 1, -1, -1):
            if common := last_common(self.whole, other, earlier):
                return common
        return 0, 0

    def _is_its(self, number: int, start: int, stop: int) -> bool:
        """Return True if the span holds all texts of the turn and none of a later turn."""
        own = self.whole.of(number).values()
        following = range(number + 1, len(self.messages))
        # A template may write a later turn in front, for example of the system.
        is_free = all(
            not start <= place < stop
            for later in following
            for place in self.whole.of(later).values()
        )
        return is_free and start < stop and all(start <= place <= stop for place in own)

    def _of_first(self, messages: int, *, prompt: bool = False) -> Placed:
        """Return the rendering of the first messages. Raises NotFound."""
        if messages == len(self.messages) and not prompt:
            return self.whole
        first, template = self.messages[:messages], self.finder.template
        try:
            text = template.text(first, self.chat, prompt=prompt)
        except ValueError as error:
            problem = str(error).removeprefix(f"is rejected by the {template.name}: ")
            raise NotFound(
                f"the {template.name} rejects the conversation up to that turn: {problem}"
            ) from error
        try:
            return self.marks.take(text, first)
        except ValueError as error:
            raise NotFound(f"the {template.name} {error}") from error
