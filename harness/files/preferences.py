"""Records of preferences: a prompt with a chosen and a rejected answer, in any of their forms.

The shared prompt is found by structure: the turns with which both sides begin.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.files.chat import Chat, chat_of
from harness.files.notes import Note
from harness.files.turns import ASSISTANT, Turn, are_turns, pairs_of, turn_of, turns_of

CHOSEN, REJECTED = "chosen", "rejected"
_TURNS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "question", "query", "instruction")
_SYSTEM = ("system", "system_prompt")
_BESIDE = ("tools", "functions", "chat_template_kwargs")
COLUMNS = (CHOSEN, REJECTED, *_TURNS, *_PROMPTS, "input", "history", _SYSTEM[0], *_BESIDE)
# Anthropic's form: one text with its speakers.
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_NAME_IT = (
    ": name the column of the prompt, as in "
    """data.columns='{prompt="NAME", chosen="chosen", rejected="rejected"}'"""
)
_ROLES = {"Human": "user", "Assistant": ASSISTANT}


def read_preference(
    record: object, columns: Mapping[str, str], objective: str
) -> tuple[Chat, list[Note]]:
    """Return the chosen conversation of a record with the rejected one in it, and notes on columns
    with content that are not read. Raises ValueError.
    """
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, not {type(record).__name__}")
    names = {name: columns.get(name, name) for name in COLUMNS}
    names["system"] = columns.get("system") or next((n for n in _SYSTEM if n in record), "system")
    row = {name: record[own] for name, own in names.items() if record.get(own) is not None}
    if REJECTED not in row or not (CHOSEN in row or any(name in row for name in _TURNS)):
        raise ValueError(_missing(record, objective))
    prompt, used = _prompt(row)
    sides = [_turns(row[REJECTED], REJECTED)]
    if CHOSEN in row:
        sides.insert(0, _turns(row[CHOSEN], CHOSEN))
    else:  # whole conversations, whose last answer is the chosen one
        last = max((n for n, turn in enumerate(prompt) if _is_assistants(turn)), default=-1)
        sides.insert(0, prompt[last:] if last >= 0 else [])
        prompt = prompt[: max(last, 0)]
    if CHOSEN in row and prompt and _is_assistants(prompt[-1]) and not all(map(_is_whole, sides)):
        raise ValueError(
            "has a prompt that ends with an answer, and chosen and rejected after it: leave that "
            "answer out, or chosen if it is the same"
        )
    beside = {name: row[name] for name in ("system", *_BESIDE) if name in row}
    chats = [chat_of(side if _is_whole(side) else [*prompt, *side], **beside) for side in sides]
    if all(map(_is_whole, sides)):
        used = {name for name in used if _says(row[name], chats[0])}
    used |= {CHOSEN, REJECTED, *beside}
    read = {names[name] for name in used}
    notes: list[Note] = [
        ("columns", str(key))
        for key, value in record.items()
        if key not in read and value not in (None, "", [], {})
    ]
    pair = _together(*chats)
    return pair, [*notes, *pair.notes]


def _missing(record: Mapping[str, object], objective: str) -> str:
    has = ", ".join(map(repr, record)) or "no keys"
    if missing := [name for name in (CHOSEN, REJECTED) if name in record and not record[name]]:
        return f"has no {missing[0]} answer: data.bad_rows=skip leaves out such rows"
    if "label" in record:
        return f"has a label for one answer, but {objective} compares two: chosen and rejected"
    return (
        f"needs chosen and rejected, or messages and rejected (train.objective={objective}); it "
        f"has {has}: name them in data.columns, as in data.columns.rejected=NAME, or leave such "
        "rows out with data.bad_rows=skip"
    )


def _prompt(row: Mapping[str, Any]) -> tuple[list[Turn], set[str]]:
    """Return the turns before the answers, and the columns that they come from."""
    turns, used = list[Turn](), set[str]()
    if "history" in row:
        turns, used = [*pairs_of(row["history"])], {"history"}
    name = next((name for name in (*_TURNS, *_PROMPTS) if name in row), None)
    if name is None:
        return turns, used
    used.add(name)
    value = row[name]
    if name == "instruction" and row.get("input"):
        used.add("input")
        value = f"{value}\n\n{row['input']}"
    return [*turns, *_turns(value, name, "user")], used


def _turns(value: object, name: str, role: str = ASSISTANT) -> list[Turn]:
    """Return the turns of a column: turns in any form, Anthropic's text, or the text of a `role`.
    Raises ValueError.
    """
    if isinstance(value, str) and not are_turns(value):
        parts = _SPEAKER.split(value)
        if len(parts) > 1 and not parts[0].strip():
            texts = zip(parts[1::2], parts[2::2], strict=True)
            said = [(_ROLES[speaker], text.strip()) for speaker, text in texts]
            return [turn_of({"role": own, "content": text}) for own, text in said if text]
        return [turn_of({"role": role, "content": value})]
    if not isinstance(value, str | list | dict):
        raise ValueError(f"{name} must be a text or turns, not {type(value).__name__}")
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        raise ValueError(f"has several texts in {name}: write one answer in a row")
    return turns_of(value, name)


def _is_assistants(turn: Turn) -> bool:
    return bool(turn.message["role"] == ASSISTANT)


def _is_whole(turns: list[Turn]) -> bool:
    """Return True for a conversation from its beginning, which is not the assistant's."""
    return bool(turns) and turns[0].message["role"] in ("system", "user")


def _says(value: object, chat: Chat) -> bool:
    """Return True if a conversation contains a prompt that stands in a column of its own, too."""
    texts = [turn.message["content"].strip() for turn in _turns(value, "prompt", "user")]
    return {*texts} <= {message["content"].strip() for message in chat.messages}


def _together(chosen: Chat, rejected: Chat) -> Chat:
    """Return the chosen side with the rejected one; their common turns are the prompt, of which
    nothing is trained on. Raises ValueError.
    """
    both = list(zip(chosen.messages, rejected.messages, strict=False))
    common = next((n for n, (one, other) in enumerate(both) if one != other), len(both))
    if len(chosen.messages) == len(rejected.messages) == common:
        raise ValueError("has the same answer on both sides: nothing to prefer")
    if not common:
        raise ValueError(
            f"has sides that begin with different turns: they answer no common prompt{_NAME_IT}"
        )
    if not any(message["role"] == "user" for message in chosen.messages[:common]):
        raise ValueError(f"has no turn of the user before its answers{_NAME_IT}")
    chosen, rejected = (replace(side, prompt=common) for side in (chosen, rejected))
    for name, side in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not side.learned():
            raise ValueError(f"has no answer of the assistant in {name} after the common prompt")
    notes = (*chosen.notes, *(note for note in rejected.notes if note not in chosen.notes))
    return replace(chosen, rejected=rejected, notes=notes)
