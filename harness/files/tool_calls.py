"""Calls of tools, and the tools themselves, as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

Call = dict[str, Any]


def calls_of(calls: object) -> list[Call]:
    """Return the calls of a turn, given as objects or as JSON text: OpenAI's tool_calls, its older
    function_call, ShareGPT's name and arguments. Raises ValueError.
    """
    calls = parsed(calls)
    return [_call(parsed(call)) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: object) -> Call:
    if not isinstance(call, dict):
        raise ValueError(f"a tool call must be an object, not {type(call).__name__}")
    function = parsed(call.get("function", call))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs the name of a function")
    named = [of[key] for of in (function, call) for key in _ARGUMENTS if key in of]
    given = next((value for value in named if value not in (None, "")), None)
    rest = {key: value for key, value in function.items() if key not in _OF_A_CALL}
    unknown = [key for key, value in rest.items() if value and key not in _OF_SERVERS]
    if given is None and unknown:
        raise ValueError(
            f"calls {function['name']} with {', '.join(unknown)}, and none of "
            f"{', '.join(_ARGUMENTS)}: name its arguments so"
        )
    function = {**rest, "name": function["name"], "arguments": _arguments(given, function["name"])}
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **identity, "function": function}


# What a function is called with: OpenAI's name, an older one, LangChain's and Anthropic's.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
# Keys beside "function", or of a call that is a function itself.
_OF_A_CALL = frozenset({"id", "type", "name", *_ARGUMENTS})
# What servers add to a call.
_OF_SERVERS = frozenset({"index", "call_id", "status"})


def _arguments(value: object, name: str) -> dict[str, Any]:
    """Return arguments as an object; null, "" and none are {}. Raises ValueError."""
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"calls {name} with arguments that are no whole JSON: {error} in {_short(value)}"
            ) from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError(f"calls {name} with arguments that are no object {{...}}: {_short(value)}")
    return arguments


def tools_of(tools: object, functions: object = None) -> list[dict[str, Any]] | None:
    """Return the schemas of tools, given as objects or as JSON text; those of OpenAI's older
    `functions`, and others without their wrapper, get it. Raises ValueError.
    """
    parts = [parsed(part) for value in (tools, functions) for part in _listed(parsed(value))]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError("tools must be an array of objects, or that as JSON text")
    return [_wrapped(part) for part in parts if isinstance(part, dict)] or None


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    is_bare = isinstance(tool.get("name"), str) and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool


def _listed(value: object) -> list[object]:
    if not value:
        return []
    return value if isinstance(value, list) else [value]


def parsed(value: object) -> object:
    """Return the value of JSON text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
