"""Data and arguments for which a run gives advice, for test_advice.py.

A row is the name of some data, additional arguments, and a part of the message. `$here` is the
folder of the data, `$small` a tokenizer.
"""

import json
import shutil
from collections.abc import Callable
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
SMALL = "data.tokenizer=$small"
PATH = f"{SMALL} data.path=$here/a.jsonl data.seq_len=16"
LONG = f"{SMALL} data.path=$here/a.jsonl data.seq_len=64"
MIX = f"{SMALL} data.seq_len=16"
FOLDER = f"{SMALL} data.path=$here/d"
TXT, VOCABULARY = "data.path=$here/a.txt data.seq_len=16", "model.overrides.vocab_size"
WHOLE, STREAM = f"{PATH} data.packing=whole", f"{PATH} data.packing=stream"
HIDES, CARRIED = "data.template=$here/hides.jinja", "model.name=lstm train.carry_state=true"
ROWS: list[tuple[str, str, str]] = [
    ("some bad rows", PATH, "data.bad_rows=skip leaves out such rows"),
    ("many bad rows", f"{PATH} data.bad_rows=skip", "fix them, or raise it"),
    ("rows marked as not learned", LONG, "as in data.where.weight=1"),
    ("rows marked by false", LONG, "as in data.where.train=True"),
    ("bad examples", LONG, "as in data.where.label=True"),
    ("a preference behind turns", f"{LONG} data.template=chatml", "' learns only chosen"),
    ("texts", f"{PATH} train.epochs=1", "lower train.global_batch (now 48), or raise train.epochs"),
    ("two forms", PATH, "name those to read, as in 'data.columns="),
    ("splits to train on", f"{SMALL} data.path=$here/d", "name one, as in data.split=train_a"),
    (
        "splits to train on",
        f'{MIX} \'data.mix=[{{path="$here/d"}}, {{path="$here/a.jsonl"}}]\'',
        'name one, as in split="train_a"',
    ),
    (
        "texts",
        f'{MIX} \'data.mix=[{{path="$here"}}, {{path="$here/a.jsonl", where={{l="de"}}}}]\'',
        "set data.eval_path, or name files or values of where",
    ),
    ("texts", f"{MIX} 'data.path=$here/*.jsonl'", "it is a pattern: name the folder"),
    ("texts", f"{PATH} train.epochs=1 train.global_batch=240", "set train.global_batch="),
    ("texts", f"{PATH} data.split=train", "has no splits: remove it"),
    ("texts", f"{MIX} data.path=$here data.split=train", "or name the files in data.path"),
    ("splits to evaluate on", f"{PATH} data.eval_path=$here/d", "name one, as in 'data.eval_path="),
    ("another suffix", f"{MIX} data.path=$here/a.jsonlines", "data.format=text reads it"),
    ("bars", f"{MIX} data.path=$here/a.psv", "data.format=csv reads it"),
    ("a pair and a text", f"{MIX} data.path=$here/d", "or name a pair, as in data.path="),
    ("a pair with masks", f"{MIX} data.path=$here/d", "name that pair alone, or in data.mix"),
    ("pairs of two widths", f"{MIX} data.path=$here/d", "or list both in data.mix"),
    ("a pair with masks", f"{MIX} data.path=$here/d/p data.min_tokens=2", "remove it for this"),
    ("a short validation split", f"{MIX} data.path=$here/d", "or set data.held_out, which"),
    ("weights with a tokenizer", f"{PATH} model.init_from=$here/m", "or leave the key out"),
    ("a pair", "data.path=$here/p data.seq_len=16", "set data.tokenizer to the one that wrote"),
    ("ids", "data.path=$here/a.jsonl data.seq_len=16", "set data.tokenizer to the one"),
    ("a pair of large ids", f"{MIX} data.path=$here/p", "set model.overrides.vocab_size=9001"),
    ("chats", LONG, "set data.template=chatml, or another name"),
    ("chats", f"{SMALL} data.path=$here/three.jsonl {HIDES}", "set data.template to one with"),
    ("chats", f"{LONG} data.template=chatml data.date=2026-01-31", "or set data.template to one"),
    ("texts", f"{PATH} data.date=2026-01-31", "template here calls strftime_now: remove data.date"),
    ("a chat and a text", f"{FOLDER} data.template=chatml data.seq_len=64", "name one of them, or"),
    ("texts", f"{PATH} model.overrides.vocab_size=256", "set model.overrides.vocab_size=300"),
    ("many words", f"{TXT} {VOCABULARY}=320", "or data.vocab_size=320"),
    ("many characters", f"{TXT} {VOCABULARY}=320", f"set {VOCABULARY}="),
    ("many words", f"{TXT} {VOCABULARY}=280", f"set {VOCABULARY}="),
    (
        "many characters",
        f"{TXT} data.vocab_size=300",
        "characters and bytes than that: increase it",
    ),
    ("a short text", f"{SMALL} data.path=$here/a.txt", "or change data.held_out (now 0.02)"),
    ("long prompts", f"{PATH} data.learn=assistant", "or set data.packing=stream"),
    ("texts", f"{WHOLE} data.too_long=refuse", "or set data.too_long to cut or drop"),
    ("texts", f"{WHOLE} data.too_long=drop", "and dropped: raise data.seq_len, or set data.too"),
    ("texts", f"{PATH} eval.seq_len=512", "lower it, or add held-out text"),
    ("texts", f"{PATH} eval.seq_len=1000 data.eval_path=$here/few.jsonl", "lower it, or add held"),
    ("prompts", f"{LONG} eval.seq_len=128", "set data.packing=stream"),
    (
        "prompts",
        f"{LONG} ramp.length_from=32 ramp.length_tokens=1000",
        "remove ramp.length_from, or",
    ),
    ("long prompts", f"{STREAM} eval.samples=1", "contain no target, only prompts"),
    ("long prompts", f"{STREAM} eval.samples=1 data.eval_path=$here/a.jsonl", "contain no target"),
    ("long prompts", f"{STREAM} data.held_out=0.005", "raise data.seq_len, or add held-out text"),
    ("prompts", f"{LONG} {CARRIED}", "set data.packing=stream, or train.carry_state=false"),
    (
        "texts",
        f"{PATH} {CARRIED} train.global_batch=480",
        "lower train.global_batch or data.seq_len",
    ),
    *(
        (
            "texts",
            f"{MIX} {length} 'data.mix=[{{path=\"$here/a.jsonl\", epochs=1}}]'",
            f"raise the epochs, or lower {length.partition('=')[0]}",
        )
        for length in ("train.steps=50", "train.tokens=99999")
    ),
    ("texts", f"{PATH} train.epochs=1 profile.steps=100:101", "set train.steps to 101 or more"),
    ("texts", f"{PATH} data.balance=text", "name a column of classes"),
    ("a run without a sample", f"{PATH} data.rehearse=$here/run", "name the path of its data"),
    ("texts", f"{PATH} model.init_from=llama-1b", "remove it for random weights of model.name="),
]
