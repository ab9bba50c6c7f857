"""Advice on data.columns: which columns of a record look like a document."""

from __future__ import annotations

import json
from collections.abc import Mapping

_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem", "source", "user")
# Of a preference: the answer to learn, and within the name of the one that must not be.
_CHOSEN, _REJECTED = "chosen", "reject"
_INPUTS = ("input", "context")
"""Columns beside an instruction of Alpaca's form, and of Dolly's."""
_ANSWERS = (
    *("answer", "response", "completion", "output", "solution", "target", "reply"),
    *("summary", "assistant", _CHOSEN),
)


def example(columns: Mapping[str, str]) -> str:
    """Return columns as the argument that names them."""
    pairs = [f"{key}={json.dumps(name, ensure_ascii=False)}" for key, name in columns.items()]
    (key, name), *more = columns.items()
    if not more and name.isidentifier():
        return f"data.columns.{key}={name}"
    return f"data.columns={{{', '.join(pairs)}}}"


def naming(record: Mapping[str, object]) -> str:
    """Return the argument that names the document of a record, as the end of a sentence; "" where
    its columns do not tell.
    """
    kept = {key: value for key, value in record.items() if _REJECTED not in key.lower()}
    texts = [key for key, value in kept.items() if isinstance(value, str)]
    turns = [key for key, value in kept.items() if _are_turns(value)]
    answers = _like(texts, _ANSWERS)
    if len(turns) == 1 and not answers:
        return f": {example({'messages': turns[0]})} names the turns"
    if "instruction" in texts and not turns and len(answers) == 1:
        names = ["instruction", *(key for key in _INPUTS if key in texts)][:2]
        columns = dict(zip(("instruction", "input"), names, strict=False))
        columns["output"] = answers[0]
        return f": {example(columns)} learns {answers[0]} alone, as a chat"
    names = turns + answers if len(turns) == 1 else turns or texts
    if pair := _pair(names):
        question, answer = pair
        said = f": {example({'prompt': question, 'completion': answer})} learns {answer} alone"
        if turns:
            return said
        chat = example({"question": question, "answer": answer})
        return f"{said}, as text behind {question}; {chat} makes a chat of them"
    is_part = _like(texts, (*_QUESTIONS, *_ANSWERS)) not in ([], [_CHOSEN])
    if len(texts) == 1 and not turns and not is_part:
        return f": {example({'text': texts[0]})} names the text"
    return ": name those to read by data.columns" if kept else ""


def _like(names: list[str], words: tuple[str, ...]) -> list[str]:
    """Return the names that have one of some words in them."""
    return [name for name in names if any(word in name.lower() for word in words)]


def _pair(names: list[str]) -> tuple[str, str] | None:
    """Return the columns of a question and its answer; None where names do not tell."""
    answers = _like(names, _ANSWERS)
    questions = [name for name in _like(names, _QUESTIONS) if name not in answers]
    if len(names) == 2 and len(answers) + len(questions) == 1:  # the other is the other
        questions = questions or [name for name in names if name not in answers]
        answers = answers or [name for name in names if name not in questions]
    if len(answers) == len(questions) == 1:
        return questions[0], answers[0]
    return None


def _are_turns(value: object) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and not first.keys().isdisjoint(("role", "from"))
