"""Conversations: OpenAI's messages and ShareGPT's conversations, checked and of one shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
ASSISTANT = "assistant"
# A tokenizer takes a hundred bytes per character.
MOST_CHARACTERS = 1 << 24
_ROLES = {"developer": "system", "function": "tool", "model": ASSISTANT} | {
    role: role for role in ("system", "user", ASSISTANT, "tool")
}
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", ASSISTANT), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
    "function_call": "function_call",
}
# Roles that may come next; None: the beginning.
_NEXT = {
    None: ("system", "user"),
    "system": ("user",),
    "user": (ASSISTANT,),
    ASSISTANT: ("user", "tool"),
    "tool": ("tool", ASSISTANT),
}


@dataclass(frozen=True)
class Chat:
    """A conversation, which is a document."""

    messages: list[Message]
    """{"role": ..., "content": ...}, as chat templates take them."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""

    @property
    def num_characters(self) -> int:
        """Length of what is said in all turns."""
        return sum(len(message.get("content") or "") for message in self.messages)

    @property
    def num_learned(self) -> int:
        """Length of what the assistant says."""
        return Chat([m for m in self.messages if m["role"] == ASSISTANT]).num_characters


def one_turn(question: str, answer: str) -> Chat:
    """Return a question with its answer. Raises ValueError as chat_of does."""
    messages = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    return chat_of(messages)


def chat_of(turns: object, tools: object = None, system: object = None) -> Chat:
    """Return a conversation. Raises ValueError with the problem, without the turn's number: equal
    problems of many conversations are one line of a report.
    """
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"messages must be an array of turns, not {_type_of(turns)}")
    messages = [_message(turn) for turn in turns]
    if system:
        messages.insert(0, {"role": "system", "content": _content(system)})
    _require_order(messages)
    chat = Chat(messages, _tools(tools))
    if chat.num_characters > MOST_CHARACTERS:
        raise ValueError(f"is a conversation of more than {MOST_CHARACTERS:,} characters")
    return chat


def _message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"a turn must be an object, not {_type_of(turn)}")
    if "role" in turn:
        name, roles, content = turn["role"], _ROLES, turn.get("content")
    elif "from" in turn:
        name, roles, content = turn["from"], _SHAREGPT, turn.get("value")
    else:
        raise ValueError(f"a turn needs role and content, or from and value; it has {list(turn)}")
    if not isinstance(name, str) or name not in roles:
        raise ValueError(f"a turn has the role {name!r}, which is none of {', '.join(roles)}")
    if roles[name] == "function_call":
        return {"role": ASSISTANT, "content": "", "tool_calls": _calls(_parsed(content))}
    used = {"role", "content", "from", "value", "tool_calls"}
    rest = {key: value for key, value in turn.items() if key not in used and value is not None}
    message = {"role": roles[name], "content": _content(content), **rest}
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = _calls(_parsed(calls))
    return message


def _content(content: object) -> str:
    """Return the text of a turn, whose parts are joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(map(_text_of_part, content))
    if not isinstance(content, str):
        raise ValueError(f"the content of a turn must be a string, not {_type_of(content)}")
    content.encode()  # a lone surrogate, "\ud800", is valid JSON and no text
    return content


def _text_of_part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else _type_of(part)
        raise ValueError(f"a turn has a part that is no text, but {kind}")
    return _content(part.get("text"))


def _calls(calls: object) -> list[dict[str, Any]]:
    """Return tool calls as templates take them: arguments as objects, not as JSON text."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        if not isinstance(call, dict):
            raise ValueError(f"a tool call must be an object, not {_type_of(call)}")
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call needs the name of a function")
        function = {**function, "arguments": _parsed(function.get("arguments") or {})}
        identity = {"id": call["id"]} if call.get("id") else {}
        made.append({"type": "function", **identity, "function": function})
    return made


def _tools(tools: object) -> list[dict[str, Any]] | None:
    tools = _parsed(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be an array of objects, or that as JSON text")
    return tools


def _parsed(value: object) -> object:
    """Return the value of JSON text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _require_order(messages: list[Message]) -> None:
    before = None
    for message in messages:
        role = message["role"]
        if role not in _NEXT[before]:
            after = "at the beginning" if before is None else f"after {before}"
            raise ValueError(
                f"has roles out of order: {role} {after}, where {' or '.join(_NEXT[before])} must "
                "be"
            )
        calls = message.get("tool_calls")
        if role == ASSISTANT and not message["content"].strip() and not calls:
            raise ValueError("has an empty assistant turn")
        before = role
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError("has no assistant turn: nothing to learn")


def _type_of(value: object) -> str:
    return "nothing" if value in (None, []) else type(value).__name__
