"""Strategies: unexpected values, and valid trees, bytes and files with changes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[T]], T]

PICKLE = b"cposix\nsystem\n(S'touch executed'\ntR."
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
# Written in place of the quoted word: no serializer would produce them.
RAW = {
    "@nested@": "[" * 3000 + "]" * 3000,
    "@tables@": '{"a":' * 1500 + "1" + "}" * 1500,
    "@digits@": "9" * 5000,
    "@nan@": "NaN",
    "@infinity@": "Infinity",
    "@exponent@": "1e999",
}
_TOML = {"@tables@": "{a=" * 1500 + "1" + "}" * 1500, "@nan@": "nan", "@infinity@": "-inf"}
NUMBERS = st.sampled_from(
    (
        *(-1, 0, 1, 2, 3, 7, 64, 1000, 65_536, 10**6, 10**8, 10**9, 2**31, 2**32, 2**53 + 1),
        *(2**63 - 1, 2**63, 2**64, 10**19, 10**30, -(10**30), 10**310),
        *(0.0, -0.0, 0.5, 1.0, -1.5, 1.0000001, 1e-30, 5e-324, 1e30, 1.7e308, 3.0e9),
    )
)
TEXTS = st.sampled_from(
    (
        *("", " ", "auto", "none", "null", "true", "0", "1e3", "x", "None", "nan", "cpu", "cuda"),
        *("adamw", "fp16", "AdamW", "os.system", "../..", "/", "/dev/null", "/proc/self/mem", "."),
        *("~nosuchuser/x", "$(touch executed)", "`touch executed`", "; touch executed", "%s%n"),
        *("{0.__class__}", "${HOME}", "a" * 300, "a" * 20_000, "/" + "a" * 300, "x/" * 2500),
        *("ü", "数据", "\u202egnp", "\U0001d518", "\x00", "a\x00b", "\x1b[31m", "\n", "\ufeff"),
        *("(a+)+$", "*", "[", "\\", "'", '"', "a=b", "a,b", "1:2", "10:5", "\ud800"),
    )
)
_NAMES = ("type", "enabled", "params", "device", "lr", "a", "", "0", "rope_type", "factor", "ü")
_PLAIN = st.sampled_from((True, False, None)) | st.integers() | st.floats()
LEAVES = NUMBERS | TEXTS | st.sampled_from([*RAW]) | _PLAIN
HOSTILE = LEAVES | st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=2)
    ),
    max_leaves=4,
)


def pick(draw: Draw[Any], options: Any) -> Any:
    """Draw one of several."""
    return draw(st.sampled_from([*options]))


def slots(tree: Any) -> list[tuple[Any, Any]]:
    """Return every position of a tree that holds a value: a dict or list, and its key or index."""
    keys = [*tree] if isinstance(tree, dict) else range(len(tree))
    places = [(tree, key) for key in keys]
    for key in keys:
        if isinstance(tree[key], dict | list):
            places += slots(tree[key])
    return places


def draw_slot(draw: Draw[Any], tree: Any) -> tuple[Any, Any]:
    """Draw a position of a tree."""
    places = slots(tree)
    return places[draw(st.integers(0, len(places) - 1))]


@st.composite
def changed(draw: Draw[Any], tree: Any) -> Any:
    """Return a copy of a tree with one to three changes."""
    tree = deepcopy(tree)
    for _ in range(pick(draw, (1, 1, 1, 2, 3))):
        if not tree:
            return draw(HOSTILE)
        holder, key = draw_slot(draw, tree)
        pick(draw, _CHANGES)(draw, holder, key, tree)
    return tree


def _replaced(draw: Draw[Any], holder: Any, key: Any, _: Any) -> None:
    holder[key] = draw(HOSTILE)


def _removed(_draw: Draw[Any], holder: Any, key: Any, _: Any) -> None:
    del holder[key]


def _renamed(draw: Draw[Any], holder: Any, key: Any, _: Any) -> None:
    if isinstance(holder, dict):
        name = str(key)
        names = (name[:-1], name + "s", name.upper(), f"_{name}", name.replace("_", "-"), "")
        holder[pick(draw, names)] = holder.pop(key)
    else:
        holder.append(holder[key])


def _added(draw: Draw[Any], holder: Any, _key: Any, _: Any) -> None:
    if isinstance(holder, dict):
        holder[pick(draw, (*_NAMES, "comment", "stagee", "a.b"))] = draw(HOSTILE)
    else:
        holder.append(draw(HOSTILE))


def _of_another_type(draw: Draw[Any], holder: Any, key: Any, _: Any) -> None:
    value = holder[key]
    others: list[Any] = [[value], {"value": value}, None, [], {}]
    if isinstance(value, bool | int | float | str):
        others += [str(value), str(value).lower()]
    if isinstance(value, bool | int | float) and abs(value) < 2**64:
        others += [bool(value), value + 0.5]
    if isinstance(value, dict):
        others += [[[name, item] for name, item in value.items()], True]
    holder[key] = pick(draw, others)


def _nudged(draw: Draw[Any], holder: Any, key: Any, _: Any) -> None:
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = pick(draw, (value + 1, value - 1, -value, value * 2, value * 1000, 0))
    elif isinstance(value, float):
        holder[key] = pick(draw, (value * 1.5, -value, value * 1e6, 0.0))
    elif isinstance(value, str):
        holder[key] = pick(draw, (value + "_", value[1:], value.upper(), value * 2, "\ud800"))
    else:
        holder[key] = draw(HOSTILE)


def _like_another(draw: Draw[Any], holder: Any, key: Any, tree: Any) -> None:
    other, name = draw_slot(draw, tree)
    holder[key] = deepcopy(other[name])


_CHANGES = (*(_replaced, _replaced, _removed, _renamed, _added), _of_another_type, _nudged,
            _nudged, _like_another)  # fmt: skip


@st.composite
def damaged(draw: Draw[Any], data: bytes) -> bytes:
    """Return bytes with a changed part, or other bytes."""
    at = draw(st.integers(0, len(data)))
    end = min(len(data), at + pick(draw, (1, 1, 4, 40, 4096)))
    early = draw(st.integers(0, min(len(data), 64)))
    other = draw(st.binary(max_size=16))
    inserted = [b"\0", b"\x1b", b"\\ud800", b"\xfc", b"// a comment\n", b",", b'"', *_raw()]
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: pick(draw, (b"", b" \n\t\n", data[:1], other, PICKLE, LFS_POINTER)),
        lambda: data[:at],
        lambda: data[:early],
        lambda: pick(draw, (data[:-1], data + b"\0", data + other, data + data, data + b"}\n{")),
        lambda: data[:at] + data[end:],
        lambda: data[:end] + data[at:],
        lambda: data[:at] + bytes(end - at) + data[end:],
        lambda: data[:at] + other + data[at + len(other) :],
        lambda: data[:early] + pick(draw, (b"\xff" * 8, other)) + data[early + 8 :],
        lambda: data[:at] + pick(draw, inserted) + data[at:],
        lambda: data[:at] + pick(draw, inserted) + data[end:],
        lambda: pick(draw, (bytes(len(data)), gzip.compress(data, 1, mtime=0), b"<html>404")),
        lambda: pick(draw, (b"\xef\xbb\xbf" + data, data.decode("latin-1").encode("utf-16"))),
        lambda: pick(draw, (data.replace(b"\n", b"\r\n"), data.replace(b'"', b"'"))),
        lambda: pick(draw, (b"[" * 100_000, b'{"a":' * 50_000, b" " * 10**6 + data)),
    )
    return bytes(pick(draw, changes)())


def _raw() -> list[bytes]:
    return [raw.encode() for raw in RAW.values()]


def _put_socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        try:  # the path of a socket may have 107 characters
            listener.bind(os.path.relpath(path))
        except OSError:
            path.mkdir()


_NO_FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": _put_socket,
    **{
        f"a link to {target}": lambda path, target=target: path.symlink_to(target or path.name)
        for target in ("", "nowhere", "/dev/zero", "/dev/null", ".")
    },
}


def replace_file(draw: Draw[Any], path: Path) -> str:
    """Replace a path by something that is not a regular file; return its name."""
    name: str = pick(draw, _NO_FILES)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    _NO_FILES[name](path)
    return f"{path.name} is {name}"


def spoil_file(draw: Draw[Any], path: Path) -> str:
    """Change a file within its format, damage its bytes or replace it; return the change."""
    way = pick(draw, ("content", "content", "content", "bytes", "bytes", "no file"))
    if way == "no file":
        return replace_file(draw, path)
    data = path.read_bytes()
    if way == "content" and path.suffix == ".json":
        write_json(path, draw(changed(json.loads(data))))
    elif way == "content" and path.suffix == ".jsonl":
        lines = data.splitlines(keepends=True)
        at = draw(st.integers(0, len(lines) - 1))
        line = to_json(draw(changed(json.loads(lines[at]))), indent=None)
        path.write_bytes(b"".join([*lines[:at], encoded(line + "\n"), *lines[at + 1 :]]))
    elif way == "content" and path.suffix == ".safetensors":
        _spoil_header(draw, path, data)
    else:
        path.write_bytes(draw(damaged(data)))
    return f"{path.name}: {way}"


def _spoil_header(draw: Draw[Any], path: Path, data: bytes) -> None:
    """Change the header of a safetensors file, but not its data."""
    (size,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + size])
    names = [name for name in table if name != "__metadata__"]
    if not names or draw(st.booleans()):
        table = draw(changed(table))
    else:
        key, values = pick(
            draw,
            (
                ("dtype", ("F64", "I64", "BOOL", "F8_E4M3", "X", "", 1, None)),
                ("shape", ([], [0], [1], [-1], [2**62], [2**31, 2**31], "x", [1.5])),
                ("data_offsets", ([0, 0], [0, 2**60], [-4, 0], [8, 4], [], [0], "x")),
            ),
        )
        table[pick(draw, names)][key] = pick(draw, values)
    header = encoded(to_json(table, indent=None))
    length = pick(draw, (len(header), len(header), len(header), 0, len(header) + 1, 2**63))
    path.write_bytes(struct.pack("<Q", length) + header + data[8 + size :])


def encoded(text: str) -> bytes:
    """Return the bytes of a text, including lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, with RAW's words replaced."""
    path.write_bytes(encoded(to_json(value)))


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return a value as JSON, with RAW's words replaced."""
    return _with_raw(json.dumps(value, indent=indent), RAW)


def to_toml(value: Any) -> str:
    """Return a value as TOML on one line; null, which TOML lacks, is a bare word."""
    return _with_raw(_toml(value), {**RAW, **_TOML})


def toml_document(tree: Any) -> str:
    """Return a run config: keys, then a table for each section."""
    if not isinstance(tree, dict):
        return to_toml(tree)
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    lines = [f"{_toml_key(key)} = {to_toml(value)}" for key, value in plain.items()]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += ["", f"[{_toml_key(name)}]"]
            lines += [f"{_toml_key(key)} = {to_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "null" if value is None else json.dumps(value)


def _toml_key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key)


def _with_raw(text: str, raws: dict[str, str]) -> str:
    for word, raw in raws.items():
        text = text.replace(json.dumps(word), raw)
    return text
