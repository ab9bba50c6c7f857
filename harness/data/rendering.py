"""Conversations as text, rendered by a tokenizer's chat template.

A template copies marks with the text around them, which shows where each text ends up. A mark
follows the last or first letter of a text, outside tags, so templates that trim a text or look for
a tag in it treat it as before.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cache, partial
from itertools import count
from typing import Any, Literal

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,
    _render_with_assistant_indices,
)

from harness.files.chat import Chat, read_template
from harness.files.pieces import Spans
from harness.files.turns import ASSISTANT, THOUGHT, Message

SAID, THOUGHT_OF, NAME, ARGUMENT = "c", "t", "f", "a"
"""Kinds of texts: what is said, what was thought, and the name and an argument of each call."""
Mark = tuple[str, int]
"""A kind, and the number of the call it belongs to."""
_THOUGHT_ENDS = re.compile(r"</think(?:ing)?>|</thought>|</reasoning>|\[/THINK\]")
_TAGS = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z_]+\]")
_LETTER, _SIGN = re.compile(r"\w"), re.compile(r"\S")
_LAST_LETTER, _LAST_SIGN = re.compile(r".*\w", re.DOTALL), re.compile(r".*\S", re.DOTALL)


@dataclass(frozen=True)
class Placed:
    """A text, and the positions of each message's marks in it."""

    text: str
    places: Mapping[int, Mapping[Mark, int]]

    def of(self, message: int) -> Mapping[Mark, int]:
        """Return the positions of a message's marks."""
        return self.places.get(message, {})


def last_common(one: Placed, other: Placed, message: int) -> tuple[int, int] | None:
    """Return the positions in two texts of a message's last mark that both contain, or None."""
    places = one.of(message)
    for mark in sorted(places, key=lambda mark: places[mark], reverse=True):
        if (place := other.of(message).get(mark)) is not None:
            return places[mark], place
    return None


class Marks:
    """The marks of one conversation; each is a word that its text does not contain."""

    def __init__(self, text: str) -> None:
        stem = next(stem for n in count() if (stem := f"Qz{n}Kx") not in text)
        self.stem, self._mark = stem, re.compile(rf"{stem}(\d+)([a-z])(\d+)z")

    def put(
        self, messages: Sequence[Message], kinds: str, *, at_begin: bool = False
    ) -> list[Message]:
        """Return messages with a mark after the last (`at_begin`: first) letter of each text;
        `kinds`: the parts of assistants' turns that get one.
        """
        numbers: dict[tuple[str, str], int] = {}
        marked = []
        for place, message in enumerate(messages):
            is_own = message["role"] == ASSISTANT
            # Templates compare messages, so equal messages must stay equal.
            key = (message["role"], str(place) if is_own else message["content"])
            number = numbers.setdefault(key, place)
            put = partial(_with_mark, f"{self.stem}{number}", at_begin)
            if is_own:
                marked.append(_in_assistants(message, kinds, put))
            else:
                marked.append({**message, "content": put(message["content"], SAID)})
        return marked

    def take(self, written: str, messages: Sequence[Message]) -> Placed:
        """Return a template's output for marked messages without the marks, with their positions.

        Raises ValueError if equal messages do not appear as often as they were given.
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
        """Return the first position of each mark, by message."""
        sharing: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            if found := self._mark.search(" ".join(_texts_of(message))):
                sharing.setdefault(int(found[1]), []).append(place)
        by_message: dict[int, dict[Mark, int]] = {}
        for number, sharers in sharing.items():
            marks = places.get(number, [])
            if len(sharers) == 1:
                for kind, place in reversed(marks):
                    by_message.setdefault(sharers[0], {})[kind] = place
            elif len(marks) == len(sharers):
                by_message |= {
                    message: {kind: place}
                    for message, (kind, place) in zip(sharers, marks, strict=True)
                }
            elif marks:
                raise ValueError("does not write equal turns as often as the conversation has them")
        return by_message


Put = Callable[..., str]
"""Returns a text with a mark of a kind; `call` is the number of the call."""


def _in_assistants(message: Message, kinds: str, put: Put) -> Message:
    made, content = dict(message), message["content"]
    ends = [end.end() for end in _THOUGHT_ENDS.finditer(content)]
    thought, said = (content[: ends[-1]], content[ends[-1] :]) if ends else ("", content)
    if THOUGHT_OF in kinds:
        thought = put(thought, THOUGHT_OF)
        if THOUGHT in message:
            made[THOUGHT] = put(message[THOUGHT], THOUGHT_OF)
    made["content"] = thought + put(said, SAID)
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
    """Return a text with a mark after its last letter outside tags, or else after its last visible
    character. A text that consists only of tags gets the mark outside them.
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


_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = "strftime_now"
"""The template function that writes the date."""

_SOURCE = "chat_template_source"
"""Tokenizer attribute that records the template name given to set_template."""
Arguments = Literal["object", "text"]


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Set a tokenizer's chat template by name, which may be that of one of its own, or .jinja file,
    also for the run and its export. Raises ConfigError.
    """
    own: Any = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    tokenizer.chat_template = own.get(template) or read_template(template, own)
    setattr(tokenizer, _SOURCE, template)


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer's chat template writes the date."""
    template: Any = tokenizer.chat_template
    return _CLOCK in (json.dumps(template) if template else "")


class ChatTemplate:
    """A chat template, rendered as of one day."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        day: str | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """`day`: the date that the template writes (data.date); None: today. `values`: values of
        its other variables (data.template_values), which a conversation may override.
        """
        self._tokenizer, self._values = tokenizer, values or {}
        today = datetime.combine(date.today(), time())
        self._now = datetime.fromisoformat(day) if day else today
        self._compiled: dict[str, Any] = {}
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self.name = f"chat template of {getattr(tokenizer, _SOURCE, tokenizer.name_or_path)}"

    def source(self, chat: Chat) -> str:
        """Return the template's source; conversations with tools may have a separate one."""
        return str(self._tokenizer.get_chat_template(tools=chat.tools))

    def marks_turns(self, chat: Chat) -> bool:
        """Return True if the template marks the assistant's part with {% generation %}."""
        return _MARKS_TURNS.search(self.source(chat)) is not None

    def names(self, key: str, chat: Chat) -> bool:
        """Return True if the template's source mentions a key."""
        return re.search(rf"\b{re.escape(key)}\b", self.source(chat)) is not None

    def variables(self, chat: Chat) -> frozenset[str]:
        """Return the variables that the template reads besides turns, tools and tokens."""
        return _variables(self.source(chat))

    def not_given(self, chat: Chat) -> list[str]:
        """Return the variables that neither the conversation nor data.template_values gives."""
        return sorted(self.variables(chat) - self._values.keys() - chat.values.keys())

    def text(self, messages: Sequence[Message], chat: Chat, *, prompt: bool = False) -> str:
        """Return the text of messages, with the tools and values of `chat`; `prompt`: with the
        start of the assistant's next turn.

        Raises ValueError if the template rejects them.
        """
        return self._render(messages, chat, prompt=prompt)[0]

    def marked(self, messages: Sequence[Message], chat: Chat) -> tuple[str, Spans]:
        """Return the text and its {% generation %} parts. Raises ValueError."""
        return self._render(messages, chat, marks=True)

    def _render(
        self, messages: Sequence[Message], chat: Chat, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, Spans]:
        try:
            compiled = self._compile(self.source(chat))
            values = {
                "documents": None,
                **self._special_tokens,
                **self._values,
                **chat.values,
                "messages": [_as_template_reads(message) for message in messages],
                "tools": chat.tools,
                "add_generation_prompt": prompt,
            }
            spans: Spans = []
            if marks:
                text, spans = _render_with_assistant_indices(compiled_template=compiled, **values)
            else:
                text = compiled.render(**values)
            text.encode()  # a lone surrogate in a tool call is valid JSON but not valid text
        except Exception as error:  # a template may raise anything
            text = f"{type(error).__name__}: {error}".replace("`chat_template`", "data.template")
            problem = " ".join(text.split())
            raise ValueError(f"is rejected by the {self.name}: {problem[:300]}") from error
        return text, spans

    def _compile(self, source: str) -> Any:
        """Return a private compiled template whose clock is fixed."""
        if source not in self._compiled:
            compiled = _compile_jinja_template.__wrapped__(source)
            compiled.globals[_CLOCK] = self._now.strftime
            self._compiled[source] = compiled
        return self._compiled[source]


_OF_A_CHAT = frozenset({"messages", "tools", "add_generation_prompt", _CLOCK})
# What a template asks of a variable that it sets itself if it is not given.
_ASKS = frozenset({"defined", "undefined", "default", "d"})


@cache
def _variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads besides the conversation and special tokens."""
    environment = _compile_jinja_template.__wrapped__(source).environment
    tree = environment.parse(source)
    names = find_undeclared_variables(tree) - environment.globals.keys() - _OF_A_CHAT
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in _ASKS]
    asked += [filtered.node for filtered in tree.find_all(nodes.Filter) if filtered.name in _ASKS]
    own -= {node.name for node in asked if isinstance(node, nodes.Name)}
    return frozenset(name for name in names - own if not name.endswith("_token"))


def with_arguments(messages: Sequence[Message], form: Arguments) -> list[Message]:
    """Return messages whose calls carry their arguments as an object or as JSON text."""
    if form == "object":
        return [*messages]
    made = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", []):
            arguments = _as_json(call["function"]["arguments"])
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def is_written_as_python(text: str, messages: Sequence[Message]) -> bool:
    """Return True if a template wrote the arguments of a call as Python, not as JSON."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    arguments = [call["function"]["arguments"] for call in calls]
    return any(
        argument and str(argument) in text and _as_json(argument) not in text
        for argument in arguments
    )


def _as_json(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _as_template_reads(message: Message) -> Message:
    """Return a message as apply_chat_template passes it to a template: without nulls, and with
    thoughts under both keys.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if THOUGHT in message:
        message = {"thinking": message[THOUGHT], **message}
    return message
