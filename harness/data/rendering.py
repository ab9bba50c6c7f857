"""The chat template of a tokenizer: conversations as text, as apply_chat_template renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,
    _render_with_assistant_indices,
)

from harness.files.chat_templates import read_template
from harness.files.pieces import Spans
from harness.files.turns import THOUGHT, Message

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = "strftime_now"
"""The function of templates that writes the date."""

_SOURCE = "chat_template_source"
"""Attribute of a tokenizer: what set_template was given."""
Tools = list[dict[str, Any]] | None
Arguments = Literal["object", "text"]


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give a tokenizer, and so the run's copy and the export, a template by name or .jinja file.

    Raises ConfigError.
    """
    tokenizer.chat_template = read_template(template)
    setattr(tokenizer, _SOURCE, template)


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer's chat template asks for the date."""
    template: Any = tokenizer.chat_template
    return _CLOCK in (json.dumps(template) if template else "")


class ChatTemplate:
    """A chat template, rendered on one day."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: str | None = None) -> None:
        """`day`: the date that it writes, as in data.date; None: today's."""
        self._tokenizer = tokenizer
        today = datetime.combine(date.today(), time())
        self._now = datetime.fromisoformat(day) if day else today
        self._compiled: dict[str, Any] = {}
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self.name = f"chat template of {getattr(tokenizer, _SOURCE, tokenizer.name_or_path)}"

    def source(self, tools: Tools) -> str:
        """Return the template's text: tools may have one of their own."""
        return str(self._tokenizer.get_chat_template(tools=tools))

    def marks_turns(self, tools: Tools) -> bool:
        """Return True if it says which part is the assistant's, by {% generation %}."""
        return _MARKS_TURNS.search(self.source(tools)) is not None

    def names(self, key: str, tools: Tools) -> bool:
        """Return True if the template's text has a name in it."""
        return re.search(rf"\b{re.escape(key)}\b", self.source(tools)) is not None

    def text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """Return the text of messages; `prompt`: and what the assistant's next turn begins with.

        Raises ValueError if the template refuses them.
        """
        return self._render(messages, tools, prompt=prompt)[0]

    def marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, Spans]:
        """Return the text and its {% generation %} parts. Raises ValueError."""
        return self._render(messages, tools, marks=True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, Spans]:
        try:
            compiled = self._compile(self.source(tools))
            values = {
                "messages": [_as_template_reads(message) for message in messages],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": prompt,
                **self._special_tokens,
            }
            spans: Spans = []
            if marks:
                text, spans = _render_with_assistant_indices(compiled_template=compiled, **values)
            else:
                text = compiled.render(**values)
            text.encode()  # a lone surrogate in a call of a tool is valid JSON and no text
        except Exception as error:  # a template may raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"is refused by the {self.name}: {problem[:300]}") from error
        return text, spans

    def _compile(self, source: str) -> Any:
        """Return a template of our own, whose clock stands still."""
        if source not in self._compiled:
            compiled = _compile_jinja_template.__wrapped__(source)
            compiled.globals[_CLOCK] = self._now.strftime
            self._compiled[source] = compiled
        return self._compiled[source]


def with_arguments(messages: Sequence[Message], form: Arguments) -> list[Message]:
    """Return messages whose calls have their arguments as an object or as JSON text."""
    if form == "object":
        return [*messages]
    made = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _as_json(call)}}
            for call in message.get("tool_calls", [])
        ]
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def is_written_as_python(text: str, messages: Sequence[Message]) -> bool:
    """Return True if a template wrote the arguments of a call as Python would, not as JSON."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    arguments = [call["function"]["arguments"] for call in calls]
    return any(of and str(of) in text and _as_json_of(of) not in text for of in arguments)


def _as_json(call: dict[str, Any]) -> str:
    return _as_json_of(call["function"]["arguments"])


def _as_json_of(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _as_template_reads(message: Message) -> Message:
    """Return a message as apply_chat_template hands it to a template: without null, and with what
    was thought under both of its names.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if THOUGHT in message:
        message = {"thinking": message[THOUGHT], **message}
    return message
