"""One turn of a conversation: its forms, its tool calls, and the parts of them that are read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.errors import shortened

Call = dict[str, Any]


def calls_of(calls: object) -> list[Call]:
    """Return the calls of a turn, from objects or JSON text: OpenAI's tool_calls, its older
    function_call, or ShareGPT's name and arguments. Raises ValueError.
    """
    calls = parsed(calls)
    return [_call(parsed(call)) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: object) -> Call:
    if not isinstance(call, dict):
        raise ValueError(f"a tool call must be an object, not {type(call).__name__}")
    function = parsed(call.get("function") or call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs the name of a function")
    named = [table[key] for table in (function, call) for key in _ARGUMENTS if key in table]
    given = next((value for value in named if value not in (None, "")), None)
    rest = {k: v for k, v in function.items() if k not in _OF_A_CALL and v is not None}
    unknown = [key for key, value in rest.items() if value and key not in _OF_SERVERS]
    if given is None and unknown:
        raise ValueError(
            f"calls {function['name']} with {', '.join(unknown)}: the key of its arguments "
            f"must be one of {', '.join(_ARGUMENTS)}"
        )
    function = {**rest, "name": function["name"], "arguments": _arguments(given, function["name"])}
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **identity, "function": function}


# Names of a call's arguments: OpenAI's, an older one, LangChain's and Anthropic's.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
# Keys beside "function", or of a call that is itself the function.
_OF_A_CALL = frozenset({"id", "type", "name", *_ARGUMENTS})
# Keys that servers add to a call.
_OF_SERVERS = frozenset({"index", "call_id", "status"})


def _arguments(value: object, name: str) -> dict[str, Any]:
    """Return arguments as an object; null, "" and missing ones become {}. Raises ValueError."""
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            problem = f"not valid JSON: {error} in {shortened(value)}"
            raise ValueError(f"calls {name} with arguments that are {problem}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"calls {name} with arguments that are not an object {{...}}: {shortened(value)}"
        )
    return arguments


def tools_of(tools: object, functions: object = None) -> list[dict[str, Any]] | None:
    """Return the schemas of tools, from objects or JSON text. OpenAI's older `functions`, and other
    tools without the wrapper, are wrapped. Raises ValueError.
    """
    parts = [parsed(part) for value in (tools, functions) for part in _listed(parsed(value))]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError("tools must be an array of objects, or such an array as JSON text")
    return [_wrapped(part) for part in parts if isinstance(part, dict)] or None


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    tool = {key: value for key, value in tool.items() if value is not None}
    is_bare = isinstance(tool.get("name"), str) and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool


def _listed(value: object) -> list[object]:
    if not value:
        return []
    return value if isinstance(value, list) else [value]


def parsed(value: object) -> object:
    """Return the value of JSON text; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


Message = dict[str, Any]
ASSISTANT = "assistant"
THOUGHT = "reasoning_content"
"""Key of a message that holds the assistant's reasoning."""

_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "bing", "bard", "bot", "model"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "ipython", "observation"), "tool"),
    **dict.fromkeys(("function_response", "tool_response"), "tool"),
    **dict.fromkeys((_CALL, "tool_call"), _CALL),
}
_THOUGHTS = (THOUGHT, "reasoning", "thinking", "thought")
# Keys that include a turn in the loss or exclude it: OpenAI's, axolotl's, ms-swift's and others.
MARKS = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "learn")
_MARKED = {0: False, 1: True}
# These mark parts of a turn, which would have to be located in the template's output.
_MARKS_OF_PARTS = ("train_detail", "training_detail")
_READ = frozenset({"role", "content", "from", "value", "tool_calls", "function_call"}).union(
    _THOUGHTS, MARKS
)
# A turn needs one of these keys, even if its value is null.
_SAYS = ("content", "value", "tool_calls", "function_call", *_THOUGHTS)
# Start of a dict that was written as Python, not as JSON.
_PYTHON = "{'"
# Keys of a question and its answer in one object, which may also hold a system text.
_PAIRS = (
    *(("human", ASSISTANT), ("user", ASSISTANT), ("instruction", "output"), ("input", "output")),
    *(("query", "response"), ("question", "answer"), ("prompt", "response")),
    ("prompt", "completion"),
)


@dataclass(frozen=True)
class Turn:
    """A turn as it was read."""

    message: Message
    is_learned: bool | None = None
    """The row's own mark for the loss; None if it has none."""
    has_lost_thought: bool = False
    """True if a role other than the assistant has reasoning, which is not read."""


def is_role(name: object) -> bool:
    """Return True for the name of a role in any form."""
    return isinstance(name, str) and name.lower() in _ROLES


def is_turn(value: object) -> bool:
    """Return True for a turn of OpenAI's or ShareGPT's form, or with other names."""
    is_usual = isinstance(value, dict) and not value.keys().isdisjoint(("role", "from"))
    return is_usual or (isinstance(value, dict) and bool(_other_names(value)))


def _other_names(turn: Message) -> dict[str, str]:
    """Return the usual names of a turn's two texts if one is a role, as in speaker, utterance."""
    texts = {key: is_role(value) for key, value in turn.items() if isinstance(value, str)}
    if any(turn.keys() >= {*pair} for pair in _PAIRS) or sorted(texts.values()) != [False, True]:
        return {}
    return {key: "role" if is_own else "content" for key, is_own in texts.items()}


def begins_with_turn(value: object) -> bool:
    """Return True for an array whose first element is a turn."""
    return isinstance(value, list) and bool(value) and is_turn(value[0])


def are_turns(value: object) -> bool:
    """Return True for turns, even as JSON text; False for a plain-text prompt."""
    if isinstance(value, str):
        return value.lstrip()[:1] == "[" and begins_with_turn(parsed(value))
    return isinstance(value, list)


def turns_of(value: object, key: str) -> list[Turn]:
    """Return the turns of a column: an array of turns or of question-answer pairs, an object of
    arrays as datasets writes it, a single turn, or any of these as JSON text. Raises ValueError.
    """
    value, was = parsed(value), value
    if isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
        sizes = {name: len(part) for name, part in value.items()}
        if len({*sizes.values()}) > 1:
            each = ", ".join(f"{size} {name}" for name, size in sizes.items())
            raise ValueError(f"{key} is an object of arrays that differ in length: {each}")
        rows = zip(*value.values(), strict=True)
        value = [dict(zip(value, row, strict=True)) for row in rows]
    if is_turn(value):
        value = [value]
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        raise ValueError(
            f"{key} is text that should be turns, but is not valid JSON: {_why_no_json(value)}"
        )
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} must be an array of turns, not {type_of(was)}")
    return [turn for part in value for turn in _turns_of_part(parsed(part))]


def _why_no_json(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        quoted = "; it looks like a Python list: write it with json.dumps"
        return f"{error}{quoted if text.lstrip()[1:].lstrip()[:2] == _PYTHON else ''}"
    return "it is nested too deeply"


def pairs_of(history: object) -> list[Turn]:
    """Return the turns of earlier pairs of question and answer, or of any form of turns_of."""
    history = parsed(history)
    if isinstance(history, list) and all(isinstance(pair, list) for pair in history):
        if not all(len(pair) == 2 for pair in history):
            raise ValueError("history must hold pairs: a question and its answer")
        history = [
            {"role": role, "content": text}
            for pair in history
            for role, text in zip(("user", ASSISTANT), pair, strict=True)
        ]
    return turns_of(history, "history")


def _turns_of_part(part: object) -> Iterator[Turn]:
    """Yield the turns of an element: one turn, or a question and answer."""
    if isinstance(part, dict) and not is_turn(part):
        pair = next((pair for pair in _PAIRS if part.keys() >= {*pair}), None)
        if pair is not None:
            system = part.get("system")
            rest = {key: part[key] for key in part if key not in (*pair, "system")}
            if system:
                yield turn_of({"role": "system", "content": system})
            yield turn_of({"role": "user", "content": part[pair[0]]})
            yield turn_of({**rest, "role": ASSISTANT, "content": part[pair[1]]})
            return
    yield turn_of(part)


def turn_of(turn: object) -> Turn:
    """Return a turn given in OpenAI's or ShareGPT's form. Raises ValueError."""
    if not isinstance(turn, dict):
        raise ValueError(f"a turn must be an object with role and content, not {type_of(turn)}")
    if turn.get("role") is None and turn.get("from") is None and (names := _other_names(turn)):
        turn = {names.get(str(key), str(key)): value for key, value in turn.items()}
    name = turn["role"] if turn.get("role") is not None else turn.get("from")
    if name is None:
        raise ValueError(f"a turn needs role and content, or from and value; it has {list(turn)}")
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"a turn has the role {name!r}, which is not one of {', '.join(_ROLES)}")
    turn, content = _with_content(turn)
    if role == "user" and content is None:
        raise ValueError("a user turn has no content")
    if role == _CALL:
        message: Message = {"role": ASSISTANT, "content": "", "tool_calls": calls_of(content)}
    else:
        message = {"role": role, "content": text_of(content)}
        if calls := _calls(turn):
            message["tool_calls"] = calls
    is_own = message["role"] == ASSISTANT
    if not is_own and "tool_calls" in message:
        raise ValueError(f"a turn of the role {name} calls tools, which only the assistant can do")
    if is_own and (thought := _thought(turn, content)):
        message[THOUGHT] = thought
    parts = content if isinstance(content, list) else []
    thinks = any(turn.get(key) for key in _THOUGHTS) or any(map(_is_thought, parts))
    return Turn({**message, **_rest(turn)}, _mark(turn), thinks and not is_own)


def _calls(turn: Message) -> list[Call]:
    """Return the calls of a turn. Raises ValueError if two keys hold different calls."""
    both = [calls_of(turn[key]) for key in ("tool_calls", "function_call") if turn.get(key)]
    both = [calls for calls in both if calls]
    functions = [[call["function"] for call in calls] for calls in both]
    if functions and functions[0] != functions[-1]:
        raise ValueError("a turn has tool_calls and function_call, which differ: remove one")
    return both[0] if both else []


def _with_content(turn: Message) -> tuple[Message, object]:
    """Return a turn and its content, from any form's key. Raises ValueError if two differ."""
    held = [turn[key] for key in ("content", "value") if turn.get(key) not in (None, "", [])]
    if held and held[0] != held[-1]:
        raise ValueError("a turn has content and value, which differ: remove one of them")
    for name in ("text", "parts"):
        if not held and turn.get(name) is not None:
            return {key: turn[key] for key in turn if key != name}, turn[name]
    if turn.keys().isdisjoint(_SAYS):
        raise ValueError(f"a turn needs content or value; it has {', '.join(turn)}: rename one")
    empty = (turn[key] for key in ("content", "value") if turn.get(key) is not None)
    return turn, held[0] if held else next(empty, None)


def _rest(turn: Message) -> Message:
    """Return the other keys, which a template may read, as plain values."""
    rest = {key: value for key, value in turn.items() if key not in _READ and value is not None}
    return {key: value if _is_plain(value) else str(value) for key, value in rest.items()}


def _is_plain(value: object) -> bool:
    if value is None or isinstance(value, str | int | float | bool):
        return True
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, list) and all(map(_is_plain, value))


def _mark(turn: Message) -> bool | None:
    """Return the turn's own mark for the loss, or None."""
    if parts := [key for key in _MARKS_OF_PARTS if turn.get(key)]:
        raise ValueError(
            f"a turn has {parts[0]}, which marks parts of its text: write weight=0 or weight=1 for "
            "the whole turn, or the row as segments"
        )
    marks = {key: turn[key] for key in MARKS if turn.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in _MARKED:
            raise ValueError(
                f"a turn has {key}={json.dumps(value, default=str)}, which must be 0 or false "
                "(read, not learned), or 1 or true"
            )
    return all(_MARKED[value] for value in marks.values()) if marks else None


def _thought(turn: Message, content: object) -> str:
    """Return the reasoning of a turn, from its own key or its content. Raises ValueError."""
    thoughts: dict[str, str] = {}
    for key in _THOUGHTS:
        if (thought := turn.get(key)) is None:
            continue
        if not isinstance(thought, str):
            raise ValueError(f"the {key} of a turn must be a string, not {type_of(thought)}")
        thought.encode()
        thoughts[key] = thought
    parts = content if isinstance(content, list) else []
    thoughts["content"] = "".join(_text_of_part(part) for part in parts if _is_thought(part))
    thoughts = {key: thought for key, thought in thoughts.items() if thought.strip()}
    if len({thought.strip() for thought in thoughts.values()}) > 1:
        raise ValueError(f"a turn has thoughts in {' and '.join(thoughts)}, which differ")
    return next(iter(thoughts.values()), "")


def text_of(content: object) -> str:
    """Return the text of a turn, joining its parts. Raises ValueError."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_text_of_part(part) for part in content if not _is_thought(part))
    if not isinstance(content, str):
        raise ValueError(f"the content of a turn must be a string, not {type_of(content)}")
    content.encode()  # a lone surrogate, "\ud800", is valid JSON but not valid text
    return content


_TEXTS = ("text", "input_text", "output_text")
_PART_THOUGHTS = ("thinking", "reasoning")
_INSTEAD = {  # for Anthropic's parts
    "tool_use": ": write the call beside content, "
    '"tool_calls": [{"function": {"name": ..., "arguments": {...}}}]',
    "tool_result": ': write a separate turn, {"role": "tool", "content": ...}',
}


def _is_thought(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _PART_THOUGHTS


def _text_of_part(part: object) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type_of(part)
    if not isinstance(part, dict) or kind not in (*_TEXTS, *_PART_THOUGHTS):
        how = _INSTEAD.get(kind, ": only text is read (no images or sound): remove these parts")
        raise ValueError(f"a turn has a part of type {kind}, not text{how}")
    key = next((k for k in ("text", kind) if part.get(k)), kind if kind in part else "text")
    if key not in part:
        raise ValueError(f"a turn has a part without a text; it has {list(part)}")
    return text_of(part[key])


def type_of(value: object) -> str:
    """Return the type of a value, for messages."""
    return "nothing" if value in (None, []) else type(value).__name__
