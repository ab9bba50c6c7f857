"""Data sets that other trainers have packed: recognised, and told how to convert.

Each command prints JSON lines. Tests run all but those that need mosaicml-streaming or litdata,
which were tried with versions 0.13 and 0.2.76.
"""

import json
import shlex
import struct
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from harness.errors import Unusable
from harness.files.file_kinds import known_format
from harness.files.other_files import is_for_readers
from harness.files.regular_file import read_json

_MOST_INDEX_BYTES = 1 << 26
_MEMBERS = 64  # of an archive that are looked at
_LLM_C = 20240520
"""First number of llm.c's files of GPT-2 tokens, in a header of 1,024 bytes."""
_INDEX = "index.json"


def why_foreign(path: Path) -> str:
    """Return what a file or folder is and the command that converts it; "" if it is none of these,
    or if the folder also has files that are read. Raises OSError.
    """
    if path.is_file():
        files = [path]
    else:
        files = [file for file in path.iterdir() if not is_for_readers(file) and file.is_file()]
        files.sort(key=lambda file: (file.name != _INDEX, file.name))
        others = [file for file in files if file.name != _INDEX]
        pairs = (file.suffix == ".idx" and file.with_suffix(".bin").is_file() for file in others)
        if any(pairs) or any(known_format(file, None) for file in others):
            return ""
    for file in files:
        look = _LOOKS.get(_INDEX if file.name == _INDEX else file.suffix)
        if look and (found := look(file)):
            return found if file in (path, path / _INDEX) else f"holds {file.name}, which {found}"
    return ""


def _converted(what: str, code: str) -> str:
    """Return a sentence about a format, with the command."""
    command = f"python -c {shlex.quote(code)} > NEW.jsonl"
    return f"is {what} and cannot be read: run {command}, and set data.path=NEW.jsonl"


def _ids(array: str) -> str:
    """Return code that prints the ids of an array, in documents of 65,536."""
    return (
        f"import json, numpy as np; ids = {array}; [print(json.dumps(dict(input_ids=ids[n : n + "
        "65536].tolist()))) for n in range(0, len(ids), 65536)]"
    )


def _text(path: Path | str) -> str:
    """Return a string in code; double quotes need no quoting in a shell's single ones."""
    return json.dumps(str(path), ensure_ascii=False)


def _index(file: Path) -> str:
    """Return the advice for an index.json of MosaicML's streaming or of litdata."""
    try:
        index = read_json(file, _MOST_INDEX_BYTES, links=True)
    except Unusable:
        return ""
    if not isinstance(index, dict):
        return ""
    shards, chunks, config = (index.get(key) for key in ("shards", "chunks", "config"))
    if isinstance(shards, list) and shards and isinstance(shards[0], dict):
        return _of_streaming(_text(file.parent), shards[0])
    if isinstance(chunks, list) and isinstance(config, dict):
        return _of_litdata(_text(file.parent), str(config.get("data_format")))
    return ""


def _of_streaming(folder: str, shard: dict[str, Any]) -> str:
    kinds = dict(
        zip(shard.get("column_names", ()), shard.get("column_encodings", ()), strict=False)
    )
    column = "text" if "text" in kinds else next(iter(kinds), "text")
    row = f"text=row[{_text(column)}]"
    if "ndarray" in str(kinds.get(column)):
        row = f"input_ids=row[{_text(column)}].tolist()"
    rows = f"StreamingDataset(local={folder}, batch_size=1)"
    return _converted(
        "in MosaicML's format MDS",
        "import json; from streaming import StreamingDataset; "
        f"[print(json.dumps(dict({row}))) for row in {rows}]",
    )


def _of_litdata(folder: str, data_format: str) -> str:
    names, how, row = "StreamingDataset", "", "row if isinstance(row, dict) else dict(text=row)"
    if "no_header" in data_format:  # tensors of ids
        names, how = "StreamingDataset, TokensLoader", ", item_loader=TokensLoader(block_size=1024)"
        row = "dict(input_ids=row.tolist())"
    return _converted(
        "in litdata's format",
        f"import json; from litdata import {names}; "
        f"[print(json.dumps({row})) for row in StreamingDataset({folder}{how})]",
    )


def _archive(file: Path) -> str:
    """Return the advice for a shard of webdataset: an archive of samples KEY.txt or KEY.json."""
    try:
        with tarfile.open(file) as archive:
            names = [member.name for member in islice(archive, _MEMBERS) if member.isfile()]
    except (tarfile.TarError, EOFError):
        return ""
    endings = {name.rpartition(".")[2] for name in names}
    ending = next((ending for ending in ("txt", "json") if ending in endings), None)
    if ending is None:
        return ""
    row = "tar.extractfile(part).read().decode()"
    row = f"dict(text={row})" if ending == "txt" else f"json.loads({row})"
    return _converted(
        "a tar of samples, as webdataset writes them,",
        f"import glob, json, tarfile; [print(json.dumps({row})) for name in "
        f"sorted(glob.glob({_text(file.parent / '*.tar')})) for tar in [tarfile.open(name)] "
        f'for part in tar if part.name.endswith(".{ending}")]',
    )


def _tokens(file: Path) -> str:
    """Return the advice for ids without an index: nanoGPT's and llm.c's .bin."""
    if file.with_suffix(".idx").exists() or file.stat().st_size % 2:
        return ""
    with file.open("rb") as opened:
        first = opened.read(4)
    if len(first) == 4 and struct.unpack("<i", first)[0] == _LLM_C:
        ids = f'np.memmap({_text(file)}, "uint16", offset=1024)'
        return _converted("a file of llm.c's tokens", _ids(ids))
    ids = f'np.memmap({_text(file)}, "uint16")'
    return _converted("a file of nanoGPT's tokens (no .idx is beside it)", _ids(ids))


def _nanoset(file: Path) -> str:
    """Return the advice for datatrove's .ds, whose metadata ends in the bytes of an id."""
    try:
        described = Path(f"{file}.metadata").read_text(errors="replace").split("\n")[0]
    except OSError:
        return ""
    kind = "uint32" if described.endswith("|4") else "uint16"
    ids = f'np.memmap({_text(file)}, "{kind}")'
    return _converted("a file of a nanoset", _ids(ids))


def _array(file: Path) -> str:
    return _converted("an array", _ids(f'np.load({_text(file)}, mmap_mode="r").ravel()'))


_LOOKS: dict[str, Callable[[Path], str]] = {
    _INDEX: _index,
    ".tar": _archive,
    ".bin": _tokens,
    ".ds": _nanoset,
    ".npy": _array,
}
