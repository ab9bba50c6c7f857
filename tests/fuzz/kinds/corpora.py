"""Data: what data.path names."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file, spoil_bytes, spoil_file
from tests.fuzz.trees import spoil_text
from tests.fuzz.values import hostile, to_json

_WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905
_SUFFIXES = (
    ".json",
    ".ndjson",
    ".JSONL",
    ".csv",
    ".md",
    ".py",
    ".txt.gz",
    ".jsonl.zst",
    "",
    ".parquet",
)
_CODECS = ("utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252", "shift-jis", "utf-7")

_PATHS = (
    *("nowhere", "", ".", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "s" * 300),
    *("~nosuchuser/x", "a/" * 3000, "*.txt", "\udcff", "https://x/y.jsonl", "x.bin", "x.idx"),
    *("/proc/self/fd/0", "secret.txt/x", "secret.txt", "hf://datasets/x", "/sys/kernel", "-"),
    "/proc/self/fdinfo",
)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """Text, JSON lines, a folder or a .bin/.idx pair; trained on for a step."""
    shape = draw.choice([*SHAPES])
    path, note = SHAPES[shape](draw, place, valid)
    words = place.training(data=False)
    words += [f"data.path={path}", f"data.tokenizer={place.base.tokenizer}", "data.held_out=0.2"]
    if shape == "chats":  # valid ones are learned whole: their answers may begin behind a sample
        learn = "all" if valid else draw.choice(("all", "last", "assistant"))
        words += ["data.template=chatml", f"data.learn={learn}"]
    return Case(words, f"{shape}: {note}", valid=valid)


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randrange(40, 120))) + ".\n"


def _text(draw: random.Random, place: Place, valid: bool) -> tuple[Path, str]:
    """A folder, of whose files one is spoiled, or a file alone, which has too few documents."""
    folder = place.folder / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(_sentence(draw))
    target = folder / "7.txt"
    text = _sentence(draw) + "ü"

    def suffixed() -> None:
        for file in folder.iterdir():
            file.rename(file.with_suffix(suffix))

    def linked() -> None:
        (folder / "link.txt").symlink_to(draw.choice((".", "..", "7.txt", "nowhere", "/dev/zero")))

    codec, suffix = draw.choice(_CODECS), draw.choice(_SUFFIXES)
    changes: dict[str, Callable[[], object]] = {
        "damaged": lambda: spoil_file(draw, target),
        "spoilt text": lambda: target.write_bytes(spoil_text(draw, text)[0]),
        f"in {codec}": lambda: target.write_bytes(text.encode(codec)),
        f"named {suffix or 'without a suffix'}": suffixed,
        "no file": lambda: replace_file(draw, target),
        "a link": linked,
        "NUL bytes": lambda: target.write_bytes(bytes(100_000)),
        "one long line": lambda: target.write_text("word " * 400_000),
        "without blanks": lambda: target.write_text("x" * 1_000_000),
        "all empty": lambda: [file.write_text("") for file in folder.iterdir()],
        "an image": lambda: (folder / "x.png").write_bytes(
            b"\x89PNG\r\n\x1a\n" + draw.randbytes(99)
        ),
        "surrogates": lambda: target.write_bytes(text.encode() + b"\xed\xa0\x80"),
        "strange names": lambda: (folder / "\udcff\n\u202e.txt").write_text(text),
        "hidden": lambda: [file.rename(folder / f".{file.name}") for file in [*folder.iterdir()]],
        "a folder in folders": lambda: _deep(folder, text),
        "no files": lambda: (shutil.rmtree(folder), folder.mkdir()),
        "one document": lambda: (shutil.rmtree(folder), folder.write_text(text)),
        "no document of any length": lambda: [file.write_text(".") for file in folder.iterdir()],
        "special tokens": lambda: target.write_text("</s><s><unk>" * 500),
    }
    note = "valid" if valid else draw.choice([*changes])
    if not valid:
        changes[note]()
    return folder, note


def _deep(folder: Path, text: str) -> None:
    inner = folder.joinpath(*"abcdefgh" * 20)
    inner.mkdir(parents=True)
    (inner / "x.txt").write_text(text)


def _lines(draw: random.Random, place: Place, valid: bool) -> tuple[Path, str]:
    """A .jsonl file with text, or with prompts and completions."""
    path = place.folder / "lines.jsonl"
    if draw.randrange(2):
        values: list[Any] = [{"text": _sentence(draw)} for _ in range(30)]
    else:
        values = [
            {"prompt": _sentence(draw)[:40], "completion": _sentence(draw)} for _ in range(30)
        ]
    texts = [json.dumps(value) for value in values]
    note = "valid"
    if not valid:
        way, at = draw.randrange(8), draw.randrange(len(texts))
        key = draw.choice([*values[at]])
        if way < 2:
            values[at][key] = hostile(draw)
            texts[at], note = to_json(values[at], indent=None), f"{key} is hostile"
        elif way == 2:
            texts[at], note = to_json(hostile(draw), indent=None), "a hostile line"
        elif way == 3:
            names = (
                "",
                "Text",
                "content",
                "messages",
                "instruction",
                "label",
                "prompt",
                "completion",
            )
            values[at][draw.choice(names)] = values[at].pop(key)
            texts[at], note = json.dumps(values[at]), f"{key} renamed"
        elif way == 4:
            bad = [
                "",
                "  ",
                "{",
                "null",
                "[]",
                "1",
                '"a"',
                "{}",
                '{"text": ""}',
                '{"text": "\\ud800"}',
            ]
            texts[at], note = draw.choice(bad), "a line of another make-up"
        elif way == 5:
            long = {**values[at], key: "word " * draw.choice((100_000, 400_000))}
            texts[at], note = json.dumps(long), "a long line"
        elif way == 6:
            data, note = spoil_bytes(draw, "\n".join(texts).encode())
            path.write_bytes(data)
            return path, note
        else:
            data, note = spoil_text(draw, "\n".join(texts))
            path.write_bytes(data)
            return path, note
    text = draw.choice(("\n", "\n", "\r\n")).join(texts) + draw.choice(("", "\n"))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path, note


def _chats(draw: random.Random, place: Place, valid: bool) -> tuple[Path, str]:
    """Conversations, of which one is hostile, or whose file is spoiled."""
    path = place.folder / draw.choice(("chats.jsonl", "chats.json"))
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]
    chats: list[Any] = [
        {
            "messages": [
                {"role": "system", "content": _sentence(draw)},
                {"role": "user", "content": _sentence(draw)},
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": "1"},
                {"role": "assistant", "content": _sentence(draw)},
            ],
            "tools": [{"name": "f"}],
        }
        for _ in range(30)
    ]
    note = "valid"
    if not valid:
        spoilt = json.loads(json.dumps(chats[7]))
        turn = draw.choice(spoilt["messages"])
        place_of = draw.choice((spoilt, turn, turn, turn.get("tool_calls", [turn])[0]))
        key = draw.choice([*place_of])
        place_of[key] = hostile(draw)
        chats[7], note = spoilt, f"{key} is hostile"
    texts = [to_json(chat, indent=None) for chat in chats]
    text = f"[{','.join(texts)}]" if path.suffix == ".json" else "\n".join(texts)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if not valid and draw.randrange(3) == 0:
        note = spoil_file(draw, path)
    return path, note


def _compressed(draw: random.Random, place: Place, valid: bool) -> tuple[Path, str]:
    """JSON lines, compressed or in another container (a valid one is not)."""
    data = "".join(json.dumps({"text": _sentence(draw)}) + "\n" for _ in range(30)).encode()
    if valid:
        path = place.folder / "plain.jsonl"
        path.write_bytes(data)
        return path, "not compressed"
    packed = {
        ".jsonl.gz": gzip.compress(data, mtime=0),
        ".jsonl.bz2": bz2.compress(data),
        ".jsonl.xz": lzma.compress(data),
        ".jsonl.zst": b"\x28\xb5\x2f\xfd" + draw.randbytes(200),
        ".parquet": b"PAR1" + draw.randbytes(200) + b"PAR1",
        ".arrow": b"ARROW1\0\0" + draw.randbytes(200),
        ".npy": b"\x93NUMPY\x01\x00" + draw.randbytes(200),
        ".pt": b"\x80\x02cposix\nmkdir\nq\x00X\x08\x00\x00\x00executedq\x01\x85q\x02Rq\x03.",
        ".tar": b"lines.jsonl".ljust(512, b"\0") + data,
    }
    suffix = draw.choice([*packed, ".zip"])
    path = place.folder / f"data{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("../lines.jsonl", data)
    else:
        path.write_bytes(packed[suffix])
    if draw.randrange(2):  # under the name of the format that is read
        path = path.rename(place.folder / "data.jsonl")
    return path, f"{suffix} as {path.name}"


def _pair(draw: random.Random, place: Place, valid: bool) -> tuple[Path, str]:
    """A .bin/.idx pair."""
    ids = place.copied(Path(f"{place.base.tokens}.bin"))
    index = place.copied(Path(f"{place.base.tokens}.idx"))
    prefix = place.folder / place.base.tokens.name
    if valid:
        return draw.choice((prefix, ids, index)), "valid"
    way = draw.randrange(9)
    if way < 2:
        return prefix, spoil_file(draw, ids)
    if way < 4:
        return prefix, spoil_file(draw, index)
    if way < 7:
        return prefix, _spoil_index(draw, index)
    if way == 7:  # ids that no tokenizer has
        data = bytearray(ids.read_bytes())
        for _ in range(draw.choice((1, 1, 50))):
            at = draw.randrange(len(data) // 2) * 2
            data[at : at + 2] = struct.pack("<H", draw.choice((511, 512, 600, 65_535)))
        ids.write_bytes(data)
        return prefix, "ids beyond the vocabulary"
    os.link(ids, place.folder / "other.bin")
    return place.folder / draw.choice(("other", "other.bin", "other.idx")), "half a pair"


def _spoil_index(draw: random.Random, path: Path) -> str:
    """Change one number of a .idx."""
    data = bytearray(path.read_bytes())
    sequences, bounds = struct.unpack_from("<QQ", data, 18)
    fields = {
        "version": (9, "<Q"),
        "type": (17, "<B"),
        "sequences": (18, "<Q"),
        "bounds": (26, "<Q"),
        "a size": (34 + 4 * draw.randrange(sequences), "<i"),
        "an offset": (34 + 4 * sequences + 8 * draw.randrange(sequences), "<q"),
        "a bound": (34 + 12 * sequences + 8 * draw.randrange(bounds), "<q"),
    }
    name = draw.choice([*fields])
    at, form = fields[name]
    (before,) = struct.unpack_from(form, data, at)
    extreme = {"<B": 255, "<i": 2**31 - 1, "<q": 2**63 - 1, "<Q": 2**64 - 1}[form]
    values = [0, 1, 2, before + 1, max(before - 1, 0), extreme]
    values += [-1, -before] if form in ("<i", "<q") else []
    value = min(draw.choice(values), extreme)
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)
    return f"{name} of the index is {value}, not {before}"


def _names(draw: random.Random, place: Place, valid: bool) -> tuple[object, str]:
    """Paths that name nothing, or something strange."""
    if valid:
        return place.base.corpus, "valid"
    place.secret()
    path = draw.choice(_PATHS)
    return path, f"the path {path[:30]!r}"


SHAPES: dict[str, Callable[[random.Random, Place, bool], tuple[object, str]]] = {
    "text": _text,
    "JSON lines": _lines,
    "chats": _chats,
    "compressed": _compressed,
    "pair": _pair,
    "name": _names,
}
