"""Finds the files of data.path without reading them.

Data of other kinds is never read as text, because a run would silently train on it. `data.format`
overrides file names.
"""

import itertools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness.errors import ConfigError, Unusable
from harness.files.arrow_rows import why_no_pyarrow
from harness.files.file_kinds import format_of, kind_of, known_format
from harness.files.first_bytes import BY_SUFFIX, GET_LFS, is_lfs_pointer
from harness.files.foreign import why_foreign
from harness.files.other_files import (
    DOT_FILES,
    DOT_FOLDERS,
    beside_data,
    is_for_readers,
    left_out_text,
)
from harness.files.paths import near_path, user_path
from harness.files.regular_file import read_json
from harness.files.splits import ALL, OF_A_SOURCE, TO_EVALUATE, Splits, splits_of, subsets_of
from harness.files.splits import NAME as CARD
from harness.files.table import Table

CorpusKind = Literal["library", "text", "indexed"]
_OTHER_HALF = {".bin": ".idx", ".idx": ".bin"}
_BESIDE, _MASKS = (".made-from.json", ".lock"), ".masks.npy"
_SKIPPED_FOLDERS = {"dist-packages", "idle_test", "idlelib", "site-packages", "test", "tests"}
_MOST_STATE_BYTES = 1 << 26
_PLAIN = {".txt", ".text", ".raw", ".tokens"}
# A dict of manual pages, read as prose after all sources, one document per page.
TOPICS = Path("pydoc_data", "topics.py")


@dataclass(frozen=True)
class CorpusFiles:
    """Files that hold documents. `path` is the prefix of a pair, or the folder of several."""

    kind: CorpusKind
    path: Path
    files: tuple[Path, ...]
    format: str | None = None
    """Format of all files; None: determined by file name."""
    left_out: str = ""
    """Files in the folder that are not read, counted by kind: "README.md (data card), 2 .png"."""
    split: str = ""
    """Split that these files belong to; "" if they are the whole folder."""
    splits: Splits = field(default_factory=Splits)
    """All splits of the folder."""

    @property
    def pairs(self) -> tuple[Path, ...]:
        """Prefix of each .bin/.idx pair, in document order."""
        bins = self.files[::2] if self.kind == "indexed" else ()
        return tuple(Path(str(file).removesuffix(".bin")) for file in bins)

    @property
    def is_folder_of_pairs(self) -> bool:
        """True if `path` is a folder with one or more pairs."""
        return self.kind == "indexed" and self.pairs != (self.path,)

    @property
    def split_text(self) -> str:
        """Text that names the split being read and the others; "" without splits."""
        if not self.split:
            return ""
        others = [label for label in self.splits.names if label != self.split]
        rest = f" (not read: {', '.join(others)})" if others else ""
        return f"split {self.split}{rest}"

    def num_bytes(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(file.stat().st_size for file in self.files)


def find_files(
    path: str | None,
    format: str | None = None,
    at_most: int | None = None,
    split: str | None = None,
) -> CorpusFiles:
    """Return the files that data.path names; None is Python's library.

    Raises ConfigError if there is no text, or data that is not text. `at_most`: stop walking
    through a folder after this many files. `split`: data.split, TO_EVALUATE or OF_A_SOURCE.
    """
    if path is None:
        return _library()
    named = user_path("data.path", path)
    try:
        corpus = _files_of(named, path, format, at_most, split)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    if split not in (None, ALL, TO_EVALUATE, OF_A_SOURCE) and not corpus.split:
        raise ConfigError(f"data.split is {split!r}, but {path} has no splits: remove it")
    return corpus


def _files_of(
    named: Path, path: str, format: str | None, at_most: int | None, split: str | None
) -> CorpusFiles:
    is_read = named.is_dir() or named.is_file()
    if format is None and is_read and (why_not := why_foreign(named)):
        raise ConfigError(f"data.path: {path} {why_not}")
    is_half = format is None and named.suffix in (".bin", ".idx")
    prefix = named.with_suffix("") if is_half else named
    pair = (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    if is_half or (not named.exists() and any(file.exists() for file in pair)):
        _require_contents(named, pair)
        return CorpusFiles("indexed", prefix, pair)
    if not named.exists():
        raise ConfigError(
            f"data.path: {path} does not exist (nor {pair[0].name} beside it)"
            f"{_instead_of(named, path)}"
        )
    if named.is_dir():
        corpus = _saved(named, split) or _files_in(named, format, at_most, split)
        if corpus.kind == "indexed":
            return corpus
    elif named.is_file():
        corpus = CorpusFiles("text", named, (named,), format)
    else:
        raise ConfigError(
            f"data.path: {path} is a device, pipe or socket: give a file, a folder or a .bin/.idx "
            "pair (text is read more than once)"
        )
    if not any(file.stat().st_size for file in corpus.files):
        rest = f", and {corpus.left_out} that cannot be read as text" if corpus.left_out else ""
        raise ConfigError(f"data.path: {path} is empty: {len(corpus.files)} files, 0 bytes{rest}")
    if named.is_file() and (why_not := kind_of(named, format)[1]):
        raise ConfigError(f"data.path: {path} {why_not}")
    return corpus


def _instead_of(named: Path, path: str) -> str:
    """Return the advice that ends a sentence about a missing path; "" if there is none."""
    if "://" in path:
        return ": it is an address, and only files are read: download it and name the file"
    if any(sign in named.name for sign in "*?[") and any(named.parent.glob(named.name)):
        return f": it is a pattern: name the folder, data.path={named.parent}"
    if near := near_path(named):
        return f"; did you mean {near}?"
    suffix = named.suffix.lower()
    is_file = bool(suffix) and (known_format(named, None) or suffix in BY_SUFFIX)
    if is_file or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path, re.ASCII):
        return ""
    name = path.replace("/", "--")
    return (
        f"; for a data set of the hub run: hf download {path} --repo-type dataset "
        f"--local-dir {name}, and set data.path={name}"
    )


def splits_in(path: str, format: str | None, split: str | None) -> tuple[Splits, str]:
    """Return the splits of data.path and the one to read; "" if there are no splits. Opens only
    files whose names do not tell their kind. Raises ConfigError as find_files does, and OSError.
    """
    folder = user_path("data.path", path)
    if not folder.is_dir():
        return Splits(), ""
    if (names := _saved_splits(folder)) is not None:
        splits = Splits({name: [name] for name in names})
    else:
        splits = _listed(folder, format, None, split).splits
    return splits, splits.chosen(split, folder)


def _saved(folder: Path, split: str | None) -> CorpusFiles | None:
    """Return the files of a folder from datasets' save_to_disk, in its order; None for others."""
    names = _saved_splits(folder)
    if names is None:
        files = _saved_files(folder)
        return None if files is None else CorpusFiles("text", folder, files)
    splits = Splits({name: [name] for name in names})
    chosen = splits.chosen(split, folder)
    files = ()
    for name in [chosen] if chosen else names:
        files += _saved_files(folder / name) or ()
    return CorpusFiles("text", folder, files, split=chosen, splits=splits)


def _saved_splits(folder: Path) -> list[str] | None:
    """Return the split names of a saved DatasetDict; None if the folder is not one."""
    path = folder / "dataset_dict.json"
    try:
        if not path.is_file():
            return None
        names = Table(read_json(path, _MOST_STATE_BYTES, links=True), path).texts("splits")
    except (Unusable, TypeError) as error:
        raise ConfigError(f"data.path: {folder}: {error}") from error
    for name in names:
        if Path(name).name != name or _saved_files(folder / name) is None:
            raise ConfigError(
                f"data.path: {path} names {name}, but there is no such saved data beside it"
            )
    return [*names]


def _saved_files(folder: Path) -> tuple[Path, ...] | None:
    state = folder / "state.json"
    try:
        if not state.is_file() or not (folder / "dataset_info.json").is_file():
            return None
        table = Table(read_json(state, _MOST_STATE_BYTES, links=True), state)
        names = [Table(entry, state).text("filename") for entry in table.row("_data_files")]
    except (Unusable, KeyError, TypeError) as error:
        raise ConfigError(f"data.path: {folder}: {error}") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"data.path: {state} names {missing[0]}, but there is no such file beside it"
        )
    if why := why_no_pyarrow():
        raise ConfigError(f"data.path: {folder} {why}")
    files = tuple(folder / name for name in names)
    _require_contents(folder, files)
    return files


def _require_contents(path: Path, files: Iterable[Path]) -> None:
    """Raise ConfigError if some files are git-lfs pointers. Raises OSError."""
    if pointers := [file for file in files if file.exists() and is_lfs_pointer(file)]:
        raise ConfigError(f"data.path: {path}: {_count(pointers)} is {GET_LFS}")


@dataclass(frozen=True)
class _Listed:
    """The visible files of a folder, classified by name."""

    files: list[Path]
    beside: dict[Path, str]
    """Files that are not data, each with a remark on what it is."""
    left_out: Counter[str]
    pairs: set[Path]
    splits: Splits


def _listed(folder: Path, format: str | None, at_most: int | None, split: str | None) -> _Listed:
    left_out = Counter[str]()
    files = [*itertools.islice(_walk(folder, left_out), at_most)]
    names = {*map(str, files)}
    pairs = {
        file.with_suffix("")
        for file in files
        if not format
        and (other := _OTHER_HALF.get(file.suffix))
        and str(file.with_suffix(other)) in names
    }
    data = _data_of(files, format)
    beside = beside_data(files, of_texts=not (data or pairs))
    files = [*_in_order(folder, (file for file in files if file not in beside))]
    if pairs:
        return _Listed(files, beside, left_out, pairs, Splits())
    inside = {file: file.relative_to(folder).as_posix() for file in files}
    named = [name for file, name in inside.items() if file in data]
    is_records = any(format_of(file, format).records for file in data)
    subsets = [] if split == ALL else subsets_of(folder / CARD)
    splits = splits_of([*inside.values()], subsets, named, records=is_records)
    return _Listed(files, beside, left_out, pairs, splits)


def _data_of(files: list[Path], format: str | None) -> set[Path]:
    """Return the files with records; without any, plain texts if the others only describe data."""
    rest = [file for file in files if not is_for_readers(file)]
    known = {file: form for file in rest if (form := known_format(file, format))}
    records = {file for file, form in known.items() if form.records}
    is_plain = all(file.suffix.lower() in _PLAIN for file in known)
    return records or ({*known} if is_plain else set())


def _files_in(
    folder: Path, format: str | None, at_most: int | None, split: str | None
) -> CorpusFiles:
    """Return a folder's text files or pairs, sorted by name, and counts of the others."""
    listed = _listed(folder, format, at_most, split)
    beside, left_out = listed.beside, listed.left_out
    if listed.pairs:
        _require_contents(folder, listed.files)
        others = []
        for file in listed.files:
            if file.suffix in _OTHER_HALF or kind_of(file, None)[0] != "binary":
                others.append(file)
            else:
                left_out[_suffix(file)] += 1
        pairs = _pairs_in(folder, listed.pairs, others)
        return CorpusFiles("indexed", folder, pairs, None, left_out_text(beside, left_out))
    chosen, names = listed.splits.chosen(split, folder), listed.splits.names
    of_splits = {folder / name for names_of in names.values() for name in names_of}
    wanted = {folder / name for name in names.get(chosen, ())}
    files: list[Path] = []
    refused: dict[str, list[Path]] = {}
    for file in listed.files:
        if chosen and file not in wanted and (file in of_splits or known_format(file, format)):
            if file not in of_splits:
                beside[file] = " (in no split)"
            continue
        kind, why_not = kind_of(file, format)
        if kind == "data":
            refused.setdefault(why_not, []).append(file)
        elif kind == "binary":
            left_out[_suffix(file)] += 1
        else:
            files.append(file)
    problems = [
        f"data.path: {folder} holds {_count(others)}, which {why_not}; or move it elsewhere"
        for why_not, others in refused.items()
    ]
    if problems:
        raise ConfigError(problems)
    left = left_out_text(beside, left_out)
    return CorpusFiles("text", folder, tuple(files), format, left, chosen, listed.splits)


def _pairs_in(folder: Path, pairs: set[Path], others: list[Path]) -> tuple[Path, ...]:
    """Return the files of all pairs. Raises ConfigError for other files: none is left unread."""
    problems = []
    beside = {f"{pair}{suffix}" for pair in pairs for suffix in _BESIDE}
    halves = {Path(f"{pair}{suffix}") for pair in pairs for suffix in _OTHER_HALF}
    others = [file for file in others if file not in halves]
    prefixes = {*map(str, pairs)}
    masked = [file for file in others if str(file).removesuffix(_MASKS) in prefixes]
    for file in sorted({*others} - {*masked}):
        if other := _OTHER_HALF.get(file.suffix):
            problems.append(f"data.path: {file} has no {other} beside it: add it, or move the file")
    if masked:
        problems.append(
            f"data.path: {folder} holds {_count(masked)}, which masks tokens of its pair: "
            "name that pair alone, or in data.mix"
        )
    left = [
        file
        for file in {*others} - {*masked}
        if str(file) not in beside and file.suffix not in _OTHER_HALF
    ]
    if left:
        problems.append(
            f"data.path: {folder} holds {len(pairs)} .bin/.idx pairs and {_count(left)}: move one "
            f"of the two elsewhere, or name a pair, as in data.path={min(pairs)}"
        )
    if problems:
        raise ConfigError(problems)
    ordered = _in_order(folder, pairs)
    return tuple(Path(f"{pair}{suffix}") for pair in ordered for suffix in (".bin", ".idx"))


def _suffix(file: Path) -> str:
    return file.suffix.lower() or "without a suffix"


def _in_order(folder: Path, files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(files, key=lambda file: file.relative_to(folder).parts))


def _count(files: list[Path]) -> str:
    more = f" and {len(files) - 1} more of its kind" if len(files) > 1 else ""
    return f"{min(files).name}{more}"


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield every visible file under a folder and count the others. Raises OSError."""

    def stop(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=stop):
        visible = [name for name in folders if not name.startswith(".")]
        left_out[DOT_FOLDERS] += len(folders) - len(visible)
        left_out["links to folders"] += sum(Path(root, name).is_symlink() for name in visible)
        folders[:] = visible
        for name in names:
            file = Path(root, name)
            if name.startswith("."):
                left_out[DOT_FILES] += 1
            elif file.is_file():
                yield file
            else:
                left_out["pipes, devices or broken links"] += 1


def _library() -> CorpusFiles:
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = []
    for folder, folders, names in os.walk(root):
        # Skipped, because site-packages alone may hold a hundred times as many files.
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        inside = Path(folder).relative_to(root)
        kept += [inside / name for name in names if name.endswith(".py")]
    if not kept:
        raise ConfigError(
            f"data.path: this Python has no sources under {root}; give a file or folder of text"
        )
    ordered = sorted(kept, key=lambda file: (file == TOPICS, file.parts))
    files = tuple(root / file for file in ordered)
    return CorpusFiles("library", root, files)
