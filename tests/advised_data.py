"""Data for which a run gives advice, for test_advice.py; advised_data.toml has the arguments."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from harness.data.pair import write_indexed
from harness.layout.shape import Shape
from tests.gates.models import LEARNED
from tests.tables import beside

TEXT = "the model reads a long question and answers it in a word or two"
SHARD = "-00000-of-00001.jsonl"


def lines(path: Path, *groups: list[Any]) -> None:
    """Write groups of lines: how often each is written, and its records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [record for times, *group in groups for record in group * times]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def pair(prefix: Path, *documents: list[int], ids: int = 9001) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_indexed(prefix, ids, ((ids, True) for ids in documents))


def texts(path: Path, count: int = 80) -> None:
    records = [{"text": f"{TEXT} {n}", "l": "de" if n % 2 else "en"} for n in range(count)]
    lines(path, [1, *records])


def written(files: Mapping[str, Any]) -> Callable[[Path], Any]:
    """Return a writer of files of advised_files.toml: texts, and groups of lines."""
    return lambda here: [
        (here / name).write_text(content)
        if isinstance(content, str)
        else lines(here / name, *content)
        for name, content in files.items()
    ]


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
    **{name: written(files) for name, files in beside(__file__, "advised_files.toml").items()},
    "texts": lambda here: [texts(here / "a.jsonl"), texts(here / "few.jsonl", 20)],
    "splits to train on": lambda here: [
        texts(here / "a.jsonl"),
        *(texts(here / "d" / f"{name}{SHARD}") for name in ("train_a", "train_b", "test")),
    ],
    "splits to evaluate on": lambda here: [
        texts(here / "a.jsonl"),
        *(texts(here / "d" / f"{name}{SHARD}") for name in ("test_a", "test_b")),
    ],
    "weights with a tokenizer": _weights,
    "another suffix": lambda here: texts(here / "a.jsonlines"),
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
