"""Conversations: turns in any supported form, validated, and chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, Unusable
from harness.files.notes import Note
from harness.files.paths import user_path
from harness.files.regular_file import read_regular
from harness.files.turns import (
    ASSISTANT,
    THOUGHT,
    Message,
    Turn,
    are_turns,
    parsed,
    text_of,
    tools_of,
    turn_of,
    turns_of,
    type_of,
)

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "templates"
_MOST_BYTES = 1 << 20
NO_TEMPLATE = (
    "data.path holds conversations, but the tokenizer has no chat template: set "
    "data.template=chatml, or another name or .jinja file"
)


def read_template(template: str, own: Iterable[str] = ()) -> str:
    """Return a bundled template or .jinja file; `own` are other names. Raises ConfigError."""
    names = sorted([*own, *(path.stem for path in TEMPLATES.glob("*.jinja"))])
    named = TEMPLATES / f"{template}.jinja"
    path = named if template in names else user_path("data.template", template)
    try:
        return read_regular(path, _MOST_BYTES, links=True).decode()
    except (OSError, Unusable, UnicodeDecodeError) as error:
        wanted = f"it must be a .jinja file or one of {', '.join(names)}"
        if not path.suffix and not path.exists():
            near = get_close_matches(template.lower(), names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"data.template is {template!r}: {wanted}{hint}") from None
        raise ConfigError(f"data.template: cannot read {template}: {error}; {wanted}") from error


# A tokenizer takes a hundred bytes per character.
MOST_CHARACTERS = 1 << 24
_MARKED: Note = ("turns", "turns of roles other than the assistant that are marked as learned")
_THOUGHT_LOST: Note = ("turns", "thoughts of roles other than the assistant (not read)")
# Variables that a row or data.template_values cannot set: they come from its turns and columns.
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Chat:
    """A conversation; each is one document."""

    messages: list[Message]
    """{"role": ..., "content": ...}, as chat templates expect them."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    unlearned: frozenset[int] = frozenset()
    """Indices of assistant turns that the row excludes from the loss."""
    prompt: int = 0
    """Number of leading messages that form a prompt, trained on only if everything is."""
    notes: tuple[Note, ...] = field(default=(), compare=False)
    """Content of the row that is not read."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The row's values for other variables of the template."""
    rejected: Chat | None = None
    """The other side of a preference pair, of which this one is chosen."""

    @property
    def num_characters(self) -> int:
        """Number of characters in all turns."""
        return sum(len(message.get("content") or "") for message in self.messages)

    @property
    def num_learned(self) -> int:
        """Number of characters of assistant text that are trained on."""
        learned = [self.messages[place] for place in self.learned()]
        return Chat(learned).num_characters

    def turns(self) -> list[int]:
        """Return the indices of the assistant's turns."""
        return [n for n, message in enumerate(self.messages) if message["role"] == ASSISTANT]

    def learned(self) -> list[int]:
        """Return the indices of assistant turns that the row does not exclude from the loss."""
        return [n for n in self.turns() if n >= self.prompt and n not in self.unlearned]


def chat_of(
    turns: Iterable[Turn],
    tools: object = None,
    functions: object = None,
    system: object = None,
    chat_template_kwargs: object = None,
) -> Chat:
    """Return a conversation of `turns`, with the schemas of its tools and values for variables of
    the template. Raises ValueError with the problem.
    """
    joined = _joined_calls(_with_system([*turns], system))
    messages = [turn.message for turn in joined]
    _require_assistant(messages)
    marks = [
        (n, turn.is_learned, turn.message["role"] == ASSISTANT) for n, turn in enumerate(joined)
    ]
    others = sum(mark is True and not is_own for _, mark, is_own in marks)
    lost = sum(turn.has_lost_thought for turn in joined)
    chat = Chat(
        messages,
        tools_of(tools, functions),
        frozenset(n for n, mark, is_own in marks if mark is False and is_own),
        notes=(_MARKED,) * others + (_THOUGHT_LOST,) * lost,
        values=_values_of(chat_template_kwargs),
    )
    if chat.num_characters > MOST_CHARACTERS:
        raise ValueError(f"is a conversation with more than {MOST_CHARACTERS:,} characters")
    return chat


def one_turn(question: str, answer: str) -> list[Turn]:
    """Return the two turns of a question and its answer."""
    return [
        turn_of({"role": "user", "content": question}),
        turn_of({"role": ASSISTANT, "content": answer}),
    ]


def completed(prompt: object, completion: object, **more: object) -> Chat:
    """Return a conversation of prompt turns, which are not trained on, and completion turns."""
    if isinstance(completion, str) and not are_turns(completion):
        completion = [{"role": ASSISTANT, "content": completion}]
    first, last = turns_of(prompt, "prompt"), turns_of(completion, "completion")
    if _goes_on(first[-1].message, last[0].message):
        raise ValueError(
            "has a completion that begins with calls of the prompt's last turn, which would be "
            "learned with them: move that turn into the completion"
        )
    chat = chat_of([*first, *last], **more)
    if not any(turn.message["role"] == ASSISTANT for turn in last):
        raise ValueError("has no assistant turn in its completion: nothing to learn")
    return replace(chat, prompt=len(chat.messages) - len(_joined_calls(last)))


def _with_system(turns: list[Turn], system: object) -> list[Turn]:
    """Return turns preceded by the system text of a separate column."""
    text = text_of(system)
    if not text:
        return turns
    first = turns[0].message if turns else {}
    if first.get("role") != "system":
        return [Turn({"role": "system", "content": text}), *turns]
    if first["content"].strip() != text.strip():
        raise ValueError("has two system texts: in the column system, and in its first turn")
    return turns


def _joined_calls(turns: list[Turn]) -> list[Turn]:
    """Return turns in which an assistant text and the calls after it are one turn."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else None
        if before is None or not _goes_on(before.message, turn.message):
            joined.append(turn)
            continue
        if (before.is_learned is False) != (turn.is_learned is False):
            raise ValueError(
                "marks a text and the tool call after it differently; they form one turn: mark "
                "both the same"
            )
        calls = [*before.message.get("tool_calls", []), *turn.message["tool_calls"]]
        thoughts = [
            spoken.message[THOUGHT] for spoken in (before, turn) if THOUGHT in spoken.message
        ]
        more = {THOUGHT: "\n".join(thoughts)} if thoughts else {}
        message = {**turn.message, **before.message, **more, "tool_calls": calls}
        joined[-1] = Turn(message, before.is_learned)
    return joined


def _goes_on(before: Message, message: Message) -> bool:
    """Return True if a turn only has calls, which belong to the assistant turn before it."""
    is_assistants = before["role"] == message["role"] == ASSISTANT
    return is_assistants and bool(message.get("tool_calls")) and not message["content"].strip()


def _require_assistant(messages: list[Message]) -> None:
    """Raise ValueError without an assistant's turn, or for an empty one; the order of roles is the
    template's business.
    """
    own = [message for message in messages if message["role"] == ASSISTANT]
    if not own:
        raise ValueError("has no assistant turn: nothing to learn")
    for turn in own:
        if not (turn["content"].strip() or turn.get("tool_calls") or turn.get(THOUGHT)):
            raise ValueError("has an empty assistant turn")


def _values_of(given: object) -> dict[str, Any]:
    """Return a row's values for variables of the template, without nulls, from an object or JSON
    text. Raises ValueError.
    """
    values = parsed(given) if given else {}
    if not isinstance(values, dict):
        raise ValueError(f"chat_template_kwargs must be an object, not {type_of(values)}")
    if problem := problem_of_values(values):
        raise ValueError(f"has chat_template_kwargs that {problem}")
    return {name: value for name, value in values.items() if value is not None}


def problem_of_values(values: Mapping[str, Any]) -> str | None:
    """Return why values cannot be given to a template; None if they can."""
    own = sorted(_OWN_VARIABLES & values.keys())
    return f"hold {own[0]}, which the turns and columns of each row give" if own else None
