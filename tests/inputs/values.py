"""Strategies: hostile JSON values, changed trees, damaged bytes and spoiled files."""

import gzip
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from harness.config.assignments import value_as_text
from tests.tables import beside

Draw = Callable[[st.SearchStrategy[Any]], Any]

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def escaped(text: str) -> str:
    """Return a text whose escapes are Python's."""
    return text.encode("ascii").decode("unicode_escape")


_TABLES = beside(__file__, "values.toml")
PATHS = (*escaped("".join(_TABLES["paths"])).split("|"), "s" * 300, "a/" * 3000)
_NUMBERS = (
    *(-1, 0, 1, 2, 3, 64, 1000, 65_536, 10**6, 10**8, 10**9, 2**31, 2**32, 2**53 + 1, 2**63 - 1),
    *(2**63, 2**64, 10**30, -(10**30), 10**310, 0.0, -0.0, 0.5, -1.5, 1e-30, 5e-324, 1.7e308, 3e9),
)
TEXTS = (
    *escaped("".join(_TABLES["texts"])).split("|"),
    *("a" * 20_000, "x/" * 2500, "word " * 100_000, "</s><s><unk>" * 500),
)
RAW = (b"9" * 5000, b"NaN", b"-Infinity", b"1e999", b"[" * 3000 + b"]" * 3000,
       b'{"a":' * 1500 + b"1" + b"}" * 1500)  # fmt: skip
_KEYS = st.sampled_from(("type", "enabled", "params", "lr", "a", "", "0", "factor", "ü", "a.b"))
_LEAVES = st.sampled_from((*_NUMBERS, *TEXTS, True, False, None))
_LEAVES |= st.integers() | st.floats()
JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every place of a tree that holds a value: a dict or list, and its key or index."""
    keys = [*tree] if isinstance(tree, dict) else range(len(tree))
    inner = (tree[key] for key in keys if isinstance(tree[key], dict | list))
    return [*((tree, key) for key in keys), *(place for part in inner for place in _places(part))]


def _others(value: Any) -> list[Any]:
    """Return values of other types, and values that are near."""
    others: list[Any] = [[value], {"value": value}, None, [], {}, True, str(value)[:100], "\ud800"]
    if isinstance(value, int | float):
        others += [value + 1, -value, value * 1000, not value, float("nan"), 2**63]
        others += [value + 0.5] if abs(value) < 2**64 else []
    elif isinstance(value, str):
        others += [value + "_", value[1:], value.upper(), value[:100] * 2, "", 1, 1.5]
    elif isinstance(value, list):
        others += [value[:-1], value + value[:1], "x", -1]
    return others + ([[*map(list, value.items())], "x"] if isinstance(value, dict) else [])


def variants(tree: Any) -> list[Any]:
    """Return copies of a tree, in each of which one value is another."""
    copies: list[Any] = []
    for number, (holder, key) in enumerate(_places(tree)):
        for value in _others(holder[key]):
            copies.append(deepcopy(tree))
            place, name = _places(copies[-1])[number]
            place[name] = value
    return copies


@st.composite
def changed(draw: Draw, tree: Any) -> Any:
    """Return a copy of a tree with one to three changes."""
    tree = deepcopy(tree)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        if not (isinstance(tree, dict | list) and tree):
            return draw(JSON)
        places = _places(tree)
        (holder, key), (other, name) = (places[draw(st.integers(0, len(places) - 1))] for _ in "ab")
        way = draw(st.sampled_from(("value", "value", "near", "near", "other", "gone", "key")))
        if way == "near":
            holder[key] = draw(st.sampled_from(_others(holder[key])))
        elif way in ("value", "other"):
            holder[key] = draw(JSON) if way == "value" else deepcopy(other[name])
        elif way == "gone" or isinstance(holder, list):
            del holder[key]
        else:
            names = [str(key)[:-1], f"{key}s", str(key).upper(), str(key).replace("_", "-")]
            holder[draw(st.sampled_from(names) | _KEYS)] = draw(st.just(holder[key]) | JSON)
    return tree


@st.composite
def damaged(draw: Draw, data: bytes) -> bytes:
    """Return bytes with a part removed, replaced or inserted, or other bytes."""
    start = draw(st.integers(0, len(data)) | st.integers(0, min(64, len(data))))
    end = min(len(data), start + draw(st.sampled_from((0, 1, 4, 40, 4096, len(data)))))
    parts = (b"", bytes(end - start), b"\xff" * 8, b"\xfc", b"\\ud800", b"// a comment\n", b",")
    part = st.sampled_from((*parts, b'"', b"}\n{", b"\x1b", *RAW))
    wholes = (
        *(b"", data[:1], b" \n\t\n", bytes(len(data)), data + data, b"<html>404", LFS_POINTER),
        *(gzip.compress(data, 1, mtime=0), b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n")),
        *(data.decode("latin-1").encode("utf-16"), data.replace(b'"', b"'"), data + b"\0"),
        *(b"[" * 100_000, b'{"a":' * 50_000, b" " * 10**6 + data, b"cposix\nsystem\n(S'x'\ntR."),
    )
    replaced = (part | st.binary(max_size=16)).map(lambda new: data[:start] + new + data[end:])
    return bytes(draw(st.sampled_from(wholes) | replaced | replaced))


@st.composite
def spoiled(draw: Draw, data: bytes, suffix: str) -> bytes:
    """Return a file with changed values or damaged bytes."""
    if not draw(st.integers(0, 2)) or suffix not in (".json", ".jsonl", ".safetensors"):
        return bytes(draw(damaged(data)))
    if suffix == ".json":
        return encoded(draw(changed(json.loads(data))))
    if suffix == ".jsonl":
        lines = data.splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(changed(json.loads(lines[at])).map(encoded) | st.binary(max_size=8))
        return b"\n".join(lines) + b"\n"
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = encoded(draw(changed(json.loads(data[8:end]))))
    size = draw(st.sampled_from((*[len(header)] * 3, 0, len(header) + 1, 2**63)))
    return struct.pack("<Q", size) + header + data[end:]


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to a secret": lambda path: path.symlink_to(Path("secret.txt").absolute()),
    "missing": lambda path: None,
}


def replace(path: Path, kind: str) -> None:
    """Replace a path by something that is not a regular file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)


def encoded(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value).encode()


def toml_document(tree: Any) -> bytes:
    """Return a run config; its tables are inline."""
    tree = tree if isinstance(tree, dict) else {"a": tree}
    lines = (f"{json.dumps(key)} = {value_as_text(value)}" for key, value in tree.items())
    return "\n".join(lines).encode("utf-8", "surrogatepass")
