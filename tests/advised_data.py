"""Data for which a run gives advice, for test_advice.py; advised_data.toml has the arguments."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from harness.data.pair import write_indexed
from harness.layout.shape import Shape
from tests.gates.models import LEARNED

TEXT = "the model reads a long question and answers it in a word or two"
TURNS = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a word"}]
# Text around a turn cannot reveal it: it is written differently when others follow.
_HIDES_TURNS = (
    "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}-{% endif %}{% endfor %}"
)
_WRITES_DATE = (
    "{{ strftime_now('%Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)


SHARD = "-00000-of-00001.jsonl"


def lines(path: Path, *records: Any, times: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records * times))


def pair(prefix: Path, *documents: list[int], ids: int = 9001) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_indexed(prefix, ids, ((ids, True) for ids in documents))


def texts(path: Path, count: int = 80) -> None:
    lines(path, *({"text": f"{TEXT} {n}", "l": "de" if n % 2 else "en"} for n in range(count)))


def texts_and(*rows: Any) -> Callable[[Path], None]:
    """Return a writer of 30 texts and these rows."""
    return lambda here: lines(here / "a.jsonl", *({"text": TEXT},) * 30, *rows)


def marked(key: str, *values: object) -> Callable[[Path], None]:
    """Return a writer of pairs that are marked with each of the values."""
    pairs = [{"prompt": TEXT, "completion": " a word", key: value} for value in values]
    return lambda here: lines(here / "a.jsonl", *pairs, times=60)


def numbers(prefix: Path, ids: int = 9001) -> None:
    """Write a pair of 30 documents."""
    pair(prefix, *([n % 200 + 3 for n in range(30)] for _ in range(30)), ids=ids)


def _weights(here: Path) -> None:
    texts(here / "a.jsonl")
    shutil.copytree(here.parent / "small", here / "m")
    config = {**LEARNED["llama"], "vocab_size": 2000, "max_position_embeddings": 64}
    (here / "m" / "config.json").write_text(json.dumps(config))
    weights = {tensor.name: torch.zeros(tensor.shape) for tensor in Shape.from_hf(config).tensors()}
    save_file(weights, here / "m" / "model.safetensors")


DATA: dict[str, Callable[[Path], Any]] = {
    "some bad rows": texts_and({"text": None}),
    "many bad rows": texts_and(*({"text": None},) * 5),
    "texts": lambda here: [texts(here / "a.jsonl"), texts(here / "few.jsonl", 20)],
    "rows marked as not learned": marked("weight", 0, 1),
    "rows marked by false": marked("train", False, True),
    "bad examples": marked("label", False, True),
    "a preference behind turns": lambda here: lines(
        here / "a.jsonl",
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]},
        times=60,
    ),
    "two forms": lambda here: lines(
        here / "a.jsonl", {"text": TEXT, "question": "a?", "answer": "b"}, times=30
    ),
    "splits to train on": lambda here: [
        texts(here / "a.jsonl"),
        *(texts(here / "d" / f"{name}{SHARD}") for name in ("train_a", "train_b", "test")),
    ],
    "splits to evaluate on": lambda here: [
        texts(here / "a.jsonl"),
        *(texts(here / "d" / f"{name}{SHARD}") for name in ("test_a", "test_b")),
    ],
    "a short validation split": lambda here: [
        texts(here / "d" / "train.jsonl"),
        lines(here / "d" / "validation.jsonl", {"text": "a word"}),
    ],
    "weights with a tokenizer": _weights,
    "another suffix": lambda here: texts(here / "a.jsonlines"),
    "bars": lambda here: (here / "a.psv").write_text("text|n\n" + f"{TEXT}|1\n" * 30),
    "a pair and a text": lambda here: [
        numbers(here / "d" / "p"),
        (here / "d" / "a.txt").write_text(TEXT),
    ],
    "a pair with masks": lambda here: [
        *(numbers(here / "d" / stem) for stem in "pq"),
        np.save(here / "d" / "p.masks.npy", np.zeros((3, 1), dtype=np.int64)),
    ],
    "pairs of two widths": lambda here: [
        numbers(here / "d" / stem, ids) for stem, ids in (("p", 300), ("q", 70_000))
    ],
    "a pair": lambda here: numbers(here / "p"),
    "a pair of large ids": lambda here: pair(here / "p", *([9000] * 30 for _ in range(30))),
    "ids": lambda here: lines(here / "a.jsonl", {"input_ids": [*range(3, 40)]}, times=30),
    "chats": lambda here: [
        lines(here / "a.jsonl", {"messages": TURNS}, times=40),
        lines(here / "three.jsonl", {"messages": TURNS * 2}, times=40),
        (here / "hides.jinja").write_text(_HIDES_TURNS),
        (here / "date.jinja").write_text(_WRITES_DATE),
    ],
    "a chat and a text": lambda here: [
        lines(here / "d" / "a.jsonl", {"messages": TURNS}, times=30),
        texts(here / "d" / "b.jsonl"),
    ],
    "prompts": lambda here: lines(
        here / "a.jsonl", {"prompt": f"{TEXT} ", "completion": "in a word"}, times=60
    ),
    "long prompts": lambda here: lines(
        here / "a.jsonl", {"prompt": TEXT * 4, "completion": "in a word"}, times=120
    ),
    "a short text": lambda here: (here / "a.txt").write_text(TEXT * 9),
    "many words": lambda here: (here / "a.txt").write_text(
        "".join(f"{n:x} {TEXT[n % 40 :]}\n" for n in range(400))
    ),
    "many characters": lambda here: (here / "a.txt").write_text(
        "".join(map(chr, range(0x4E00, 0x4E00 + 600))) * 3
    ),
    "a run without a sample": lambda here: [
        texts(here / "a.jsonl"),
        (here / "run").mkdir(),
        (here / "run" / "plan.json").write_text("{}"),
    ],
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield the rows of advised_data.toml: data, arguments, and a part of the message."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    words = table.pop("words")
    for data, lines in table.items():
        for line, message in lines.items():
            for name in reversed(words):  # a word may hold an earlier one
                line = re.sub(rf"{re.escape(name)}\b", lambda _, name=name: words[name], line)
            yield data, line, message


ROWS = [*rows()]
