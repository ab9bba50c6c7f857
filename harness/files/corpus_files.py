"""Finds the files of data.path, without reading them.

Data of another kind is never read as text: a run would silently train on it. `data.format`
overrides file names.
"""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.errors import ConfigError, Unusable
from harness.files.compressed import why_no_pyarrow
from harness.files.file_kinds import kind_of
from harness.files.paths import user_path
from harness.files.regular_file import read_json
from harness.files.table import Table

CorpusKind = Literal["library", "text", "indexed"]
_OTHER_HALF = {".bin": ".idx", ".idx": ".bin"}
_BESIDE, _MASKS = (".made-from.json", ".lock"), ".masks.npy"
_SKIPPED_FOLDERS = {"dist-packages", "idle_test", "idlelib", "site-packages", "test", "tests"}
_MOST_STATE_BYTES = 1 << 26
# A dict of manual pages: read as prose, one document each, after all sources.
TOPICS = Path("pydoc_data", "topics.py")


@dataclass(frozen=True)
class CorpusFiles:
    """Files that hold documents. When `kind` is "indexed", `path` is the prefix of a pair, or the
    folder of several.
    """

    kind: CorpusKind
    path: Path
    files: tuple[Path, ...]
    format: str | None = None
    """Format of all files; None: by file name."""
    left_out: str = ""
    """Files of a folder that are not read, counted by kind: "2 .png, 1 link to a folder"."""

    @property
    def pairs(self) -> tuple[Path, ...]:
        """The prefix of each .bin/.idx pair, in the order of their documents."""
        bins = self.files[::2] if self.kind == "indexed" else ()
        return tuple(Path(str(file).removesuffix(".bin")) for file in bins)

    @property
    def is_folder_of_pairs(self) -> bool:
        """True if `path` is the folder of several pairs, or of one."""
        return self.kind == "indexed" and self.pairs != (self.path,)

    def num_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.stat().st_size for file in self.files)


def find_files(
    path: str | None, format: str | None = None, at_most: int | None = None
) -> CorpusFiles:
    """Return the files that `data.path` names; None is Python's library.

    Raises ConfigError if there is no text, or data that is not text. `at_most`: number of files
    after which the walk through a folder ends.
    """
    if path is None:
        return _library()
    named = user_path("data.path", path)
    try:
        return _files_of(named, path, format, at_most)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error


def _files_of(named: Path, path: str, format: str | None, at_most: int | None) -> CorpusFiles:
    is_half = format is None and named.suffix in (".bin", ".idx")
    prefix = named.with_suffix("") if is_half else named
    pair = (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    if is_half or (not named.exists() and any(file.exists() for file in pair)):
        return CorpusFiles("indexed", prefix, pair)
    if not named.exists():
        raise ConfigError(
            f"data.path: {path} does not exist (nor {pair[0].name} beside it){_of_hub(path)}"
        )
    left_out = ""
    if named.is_dir() and (saved := saved_dataset(named)) is not None:
        files = saved
    elif named.is_dir():
        corpus = _files_in(named, format, at_most)
        if corpus.kind == "indexed":
            return corpus
        files, left_out = corpus.files, corpus.left_out
    elif named.is_file():
        files = (named,)
    else:
        raise ConfigError(
            f"data.path: {path} is a device, pipe or socket: give a file, a folder or a .bin/.idx "
            "pair (text is read more than once)"
        )
    if not any(file.stat().st_size for file in files):
        rest = f", and {left_out} that cannot be read as text" if left_out else ""
        raise ConfigError(f"data.path: {path} is empty: {len(files)} files, 0 bytes{rest}")
    if files == (named,) and (why_not := kind_of(named, format)[1]):
        raise ConfigError(f"data.path: {path} {why_not}")
    return CorpusFiles("text", named, files, format, left_out)


def _of_hub(path: str) -> str:
    """Return the command that fetches a hub's data set; "" if the path cannot be its name."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path, re.ASCII):
        return ""
    name = path.replace("/", "--")
    return (
        f"; a data set of the hub is fetched by: hf download {path} --repo-type dataset "
        f"--local-dir {name}, and read by data.path={name}"
    )


def saved_dataset(folder: Path) -> tuple[Path, ...] | None:
    """Return the files of a folder of datasets' save_to_disk, in its order; None for others.

    Raises ConfigError for one with several splits, and for damaged ones.
    """
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.is_file():
            names = read_json(splits, _MOST_STATE_BYTES, links=True)
            names = names["splits"] if isinstance(names, dict) else []
            if len(names) == 1:
                return saved_dataset(folder / names[0])
            raise ConfigError(
                f"data.path: {folder} holds the splits {', '.join(map(str, names))}: name one, as "
                f"in data.path={folder / 'train'}"
            )
        if not state.is_file() or not (folder / "dataset_info.json").is_file():
            return None
        table = Table(read_json(state, _MOST_STATE_BYTES, links=True), state)
        files = [Table(entry, state).text("filename") for entry in table.row("_data_files")]
    except (Unusable, KeyError, TypeError) as error:
        raise ConfigError(f"data.path: {folder}: {error}") from error
    missing = [name for name in files if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"data.path: {state} names {missing[0]}, which is no file beside it")
    if why := why_no_pyarrow():
        raise ConfigError(f"data.path: {folder} {why}")
    return tuple(folder / name for name in files)


def _files_in(folder: Path, format: str | None, at_most: int | None) -> CorpusFiles:
    """Return a folder's text files, or its pairs, in the order of their names, and counts of the
    others. Raises ConfigError.
    """
    files: list[Path] = []
    left_out = Counter[str]()
    refused: dict[str, list[Path]] = {}
    pairs: set[Path] = set()
    halves: list[Path] = []
    for file in itertools.islice(_walk(folder, left_out), at_most):
        other = None if format else _OTHER_HALF.get(file.suffix)
        if other and file.with_suffix(other).exists():
            pairs.add(file.with_suffix(""))
            continue
        halves += [file] if other else []
        kind, why_not = kind_of(file, format)
        if kind == "data":
            refused.setdefault(why_not, []).append(file)
        elif kind == "binary":
            left_out[file.suffix.lower() or "without a suffix"] += 1
        else:
            files.append(file)
    if pairs:
        others = [*files, *itertools.chain.from_iterable(refused.values()), *halves]
        return CorpusFiles("indexed", folder, _pairs_in(folder, pairs, others))
    problems = [
        f"data.path: {folder} holds {_count(others)}, which {why_not}; or move it elsewhere"
        for why_not, others in refused.items()
    ]
    if problems:
        raise ConfigError(problems)
    counts = sorted((+left_out).items(), key=lambda item: (-item[1], item[0]))
    left = ", ".join(f"{count} {kind}" for kind, count in counts)
    return CorpusFiles("text", folder, _in_order(folder, files), format, left)


def _pairs_in(folder: Path, pairs: set[Path], others: list[Path]) -> tuple[Path, ...]:
    """Return the files of pairs. Raises ConfigError for what else there is: a folder is read
    whole, or not at all.
    """
    problems = []
    beside = {f"{pair}{suffix}" for pair in pairs for suffix in _BESIDE}
    masked = [file for file in others if str(file).removesuffix(_MASKS) in map(str, pairs)]
    for file in sorted({*others} - {*masked}):
        if other := _OTHER_HALF.get(file.suffix):
            problems.append(f"data.path: {file} has no {other} beside it: add it, or move this")
    if masked:
        problems.append(
            f"data.path: {folder} holds {_count(masked)}, which says what of its pair is not "
            "learned: name that pair alone, or in data.mix"
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


def _in_order(folder: Path, files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(files, key=lambda file: file.relative_to(folder).parts))


def _count(files: list[Path]) -> str:
    more = f" and {len(files) - 1} more of its kind" if len(files) > 1 else ""
    return f"{min(files).name}{more}"


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield every visible file under a folder; count other entries. Raises OSError."""

    def stop(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=stop):
        visible = [name for name in folders if not name.startswith(".")]
        left_out["links to folders"] += sum(Path(root, name).is_symlink() for name in visible)
        folders[:] = visible
        for name in names:
            file = Path(root, name)
            if name.startswith("."):
                continue
            if file.is_file():
                yield file
            else:
                left_out["pipes, devices or broken links"] += 1


def _library() -> CorpusFiles:
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = []
    for folder, folders, names in os.walk(root):
        # Not entered: site-packages alone may hold a hundred times as many files.
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        inside = Path(folder).relative_to(root)
        kept += [inside / name for name in names if name.endswith(".py")]
    if not kept:
        raise ConfigError(
            f"data.path: this Python keeps no sources under {root}; give a file or folder of text"
        )
    ordered = sorted(kept, key=lambda file: (file == TOPICS, file.parts))
    files = tuple(root / file for file in ordered)
    return CorpusFiles("library", root, files)
