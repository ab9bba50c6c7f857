"""Splits of a folder, found from its data card or its file names.

A data card is a README.md that starts with YAML; its `configs`, if readable, name the files.
Otherwise splits follow from the names of files (train-00000-of-00002.parquet, dev.jsonl) and
folders (test/a.jsonl), as `datasets` finds them. Only whole words count: contest.jsonl is in no
split.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import ConfigError

NAME = "README.md"
_MOST_BYTES = 1 << 22
_FILES = {"configs", "dataset_info"}
_KEYS = _FILES | {
    *("annotations_creators", "language", "language_creators", "license", "multilinguality"),
    *("pretty_name", "size_categories", "source_datasets", "task_categories", "task_ids"),
}
"""Keys of data cards; pages of other sites have few of them or none."""
# Must not match ambiguously: a line of spaces would take hours.
_KEY = re.compile(r"""("[^"]*"\s*|'[^']*'\s*|[^\s"'\[\]{}#:-][^:#]*):(?:\s+(.*))?$""")
_MOST_CHARACTERS = 1 << 18
"""Maximum length of `configs` in characters: PyYAML reads about 100,000 per second."""
_Lines = list[tuple[int, str]]  # (indentation, text) per line


@dataclass(frozen=True)
class Subset:
    """An entry of `configs`: its file patterns by split."""

    name: str
    is_default: bool
    patterns: dict[str, list[str]]


def is_card(file: Path, *, beside_texts: bool = True) -> bool:
    """Return True if a Markdown file starts like a data card; beside texts, its keys must also be
    those of cards rather than of web pages. Raises OSError.
    """
    keys = {key for key, _ in _top_level(_front_matter(file))}
    if not beside_texts:
        return bool(keys)
    return bool(keys & _FILES) or len(keys & _KEYS) > 1


def subsets_of(file: Path) -> list[Subset]:
    """Return the subsets whose files a card names; empty without a card. Raises OSError, and
    ConfigError if `configs` is too long to be read.
    """
    if not file.is_file():
        return []
    blocks = [block for key, block in _top_level(_front_matter(file)) if key == "configs"]
    size = sum(indent + len(text) + 1 for block in blocks[:1] for indent, text in block)
    if size > _MOST_CHARACTERS:
        raise ConfigError(
            f"data.path: {file} names files in {size:,} characters (configs), of which at most "
            f"{_MOST_CHARACTERS:,} are read: name the folder or files of a subset, or set "
            f"data.split={ALL} to read all subsets"
        )
    try:
        subsets = [_subset(config) for block in blocks[:1] for config in _configs(block)]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return []
    return [subset for subset in subsets if subset.patterns]


def _subset(config: dict[str, Any]) -> Subset:
    files, folder = config.get("data_files"), str(config.get("data_dir") or "").strip("/")
    if files and isinstance(files, str):
        files = [files]
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else ():
        subset = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = subset["path"] if isinstance(subset["path"], list) else [subset["path"]]
        inside = [f"{folder}/{path}" if folder else str(path) for path in paths]
        patterns.setdefault(str(subset.get("split", "train")), []).extend(inside)
    name = str(config.get("config_name", "default"))
    return Subset(name, name == "default" or config.get("default") == "true", patterns)


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches the path of a file inside the folder. A pattern that ends
    with a plain name also matches all files below a folder of that name.
    """
    parts, path = _parts_of(pattern), name.split("/")
    reached = {0}  # numbers of leading path parts that the pattern can match so far
    for part in parts:
        if part == "**":
            reached = {*range(min(reached), len(path) + 1)}
        else:
            reached = {at + 1 for at in reached if at < len(path) and _names(part, path[at])}
        if not reached:
            return False
    return len(path) in reached or (bool(parts) and not _WILDCARD.search(parts[-1]))


def _parts_of(pattern: str) -> list[str]:
    """Return the parts of a pattern; "**" is always a separate part."""
    apart = re.sub(r"(^|/)\*\*(?=[^/])", r"\1**/*", pattern.removeprefix("./"))
    return [part for part in apart.split("/") if part]


def _names(pattern: str, part: str) -> bool:
    try:
        return fnmatchcase(part, pattern)
    except re.error:  # for example [z-a]
        return False


def _front_matter(file: Path) -> _Lines:
    """Return the lines between the first two "---" without comments; empty if there are none."""
    with file.open("rb") as opened:
        lines = opened.read(_MOST_BYTES).decode("utf-8-sig", errors="replace").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return []
    stripped = [line.rstrip() for line in lines]
    if "---" not in stripped[1:]:
        return []
    inside = stripped[1 : stripped.index("---", 1)]
    return [
        (len(line) - len(line.lstrip()), line.lstrip())
        for line in inside
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _top_level(lines: _Lines) -> list[tuple[str, _Lines]]:
    """Return each top-level key with its line and the lines that belong to it."""
    blocks: list[tuple[str, _Lines]] = []
    for indent, text in lines:
        if not indent and text[:1] != "-" and (key := _KEY.match(text)):
            blocks.append((key[1].rstrip(), []))
        if blocks:
            blocks[-1][1].append((indent, text))
    return blocks


def _configs(lines: _Lines) -> list[Any]:
    """Return the value of the key `configs`. Raises ValueError or TypeError if it has none."""
    import yaml  # this floor needs nothing but the standard library

    text = "\n".join(f"{' ' * indent}{text}" for indent, text in lines)
    try:
        # Every scalar is text: no dates, no objects.
        configs: list[Any] = yaml.load(text, Loader=yaml.BaseLoader)["configs"]
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    return configs


ALL = "all"
"""Value of data.split that reads the whole folder."""
TO_EVALUATE = "validation or test"
"""Stands for an unset data.split in a held-out set: validation is preferred."""
OF_A_SOURCE = "train, of a source of data.mix"
"""Stands for an unset data.split in a source of data.mix, which has its own `split`."""
TRAIN, VALIDATION, TEST = "train", "validation", "test"
_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
_WILDCARD = re.compile(r"[*?\[]")
_SHARD = re.compile(r"(.+?)[-._]\d{5}-of-\d{5}")
_SHOWN = 12


@dataclass(frozen=True)
class Splits:
    """The file names of a folder by split: "train", or "SUBSET/train" with several subsets."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    default: str = ""
    """Subset to read unless data.split names another; "" without one."""

    def chosen(self, wanted: str | None, path: object) -> str:
        """Return the split to read; "" for the whole folder. Raises ConfigError."""
        if wanted == ALL or not self.names:
            if wanted in (None, ALL, TO_EVALUATE, OF_A_SOURCE):
                return ""
            raise ConfigError(
                f"data.split is {wanted!r}, but {path} has no splits: neither a data card nor its "
                f"file names define any; remove it, or name the files in data.path"
            )
        if wanted in self.names:
            return str(wanted)
        if wanted in (None, TO_EVALUATE, OF_A_SOURCE):
            labels = self._of(self.default) if self.default else [*self.names]
            evaluates = wanted == TO_EVALUATE
            best = _best(labels, (VALIDATION, TEST) if evaluates else (TRAIN,))
            if best is None:
                none = "" if evaluates or _with(labels, TRAIN) else ", and no train"
                raise ConfigError(
                    f"data.path: {path} holds the splits {_listed(labels)}{none}: name one, as in "
                    f"{_named(labels[0], wanted, path)}"
                )
            return best
        labels = self._of(str(wanted)) or [
            label for label in self._of(self.default) if label.endswith(f"/{wanted}")
        ]
        if (best := _best(labels, (TRAIN,))) is None:
            raise ConfigError(
                f"data.split is {wanted!r}, but {path} holds the splits {_listed([*self.names])}"
            )
        return best

    def held_out(self, chosen: str) -> list[str]:
        """Return the splits to hold out beside `chosen`: validation, then test."""
        subset, _, split = chosen.rpartition("/")
        others = [label for label in self._of(subset) if label != chosen]
        held_out = []
        for kind in (VALIDATION, TEST):
            of_kind = _with(others, kind)
            same = [label for label in of_kind if _rest(label) == _rest(chosen)]
            held_out += same or ([] if _rest(split) else of_kind)
        return held_out

    def _of(self, subset: str) -> list[str]:
        return [label for label in self.names if label.rpartition("/")[0] == subset]


def splits_of(
    names: Sequence[str], subsets: Sequence[Subset], data: Sequence[str], *, records: bool
) -> Splits:
    """Return the splits of a folder's files.

    `data`: files whose names count, which excludes code and pages. `records`: True if they hold
    records; names of texts, which may be about tests, count only beside a train split.
    """
    return _of_card(names, subsets) or Splits(_by_name(data, records=records))


def _of_card(names: Sequence[str], subsets: Sequence[Subset]) -> Splits | None:
    """Return the splits of a card, restricted to existing files; None if it names none of them."""
    present: dict[str, dict[str, list[str]]] = {}
    for subset in subsets:
        for split, patterns in subset.patterns.items():
            if files := [n for n in names if any(matches(n, pattern) for pattern in patterns)]:
                present.setdefault(subset.name, {})[split] = files
    if not present:
        return None
    if len(present) == 1:
        return Splits(next(iter(present.values())))
    default = next(
        (subset.name for subset in subsets if subset.is_default and subset.name in present), ""
    )
    labelled = {
        f"{name}/{split}": files
        for name, splits in present.items()
        for split, files in splits.items()
    }
    return Splits(labelled, default)


def _by_name(names: Sequence[str], *, records: bool) -> dict[str, list[str]]:
    """Return the files of each split by name; empty if nothing is held out."""
    stems = {(*_parts(_stem(name)),) for name in names}
    labels = {name: _label(name, stems, _beside_train) for name in names}
    if TRAIN not in map(kind_of_split, labels.values()):
        if not records:
            return {}
        labels = {name: _label(name, stems, _beside_others) for name in names}
        if any(labels.values()):
            labels = {name: label or TRAIN for name, label in labels.items()}
    if not {kind_of_split(label) for label in labels.values()} & {VALIDATION, TEST}:
        return {}
    splits: dict[str, list[str]] = {}
    for name, label in labels.items():
        if label:
            splits.setdefault(label, []).append(name)
    order = (TRAIN, VALIDATION, TEST)
    return {label: splits[label] for kind in order for label in sorted(_with(splits, kind))}


_Stem = tuple[str, ...]


def _label(name: str, stems: set[_Stem], counts: Callable[[_Stem, int, set[_Stem]], bool]) -> str:
    """Return the split named by a file or its folder, or "". `counts` judges a word of a name."""
    stem = _stem(name)
    if (shard := _SHARD.match(stem)) and kind_of_split(shard[1]):
        return shard[1]
    parts = (*_parts(stem),)
    for place in reversed(range(len(parts))):
        if parts[place] in _WORDS and counts(parts, place, stems):
            return _WORDS[parts[place]]
    folders = PurePosixPath(name.lower()).parts[:-1]
    return next((_WORDS[folder] for folder in reversed(folders) if folder in _WORDS), "")


def _beside_train(parts: _Stem, place: int, stems: set[_Stem]) -> bool:
    """Return True for "test" in "a_test" and "test_a"; in "a_test_b" only beside "a_train_b"."""
    others = ((*parts[:place], word, *parts[place + 1 :]) for word in _WORDS)
    return place in (0, len(parts) - 1) or any(stem != parts and stem in stems for stem in others)


def _beside_others(parts: _Stem, place: int, stems: set[_Stem]) -> bool:
    """Return True for "test", and for "a_test" only beside "a": "unit_test" is not a split."""
    return len(parts) == 1 or (place == len(parts) - 1 and parts[:-1] in stems)


def _stem(name: str) -> str:
    """Return a file's name without its suffixes, including that of compression."""
    path = PurePosixPath(PurePosixPath(name.lower()).name)
    return path.with_suffix("").stem if path.suffix in (".gz", ".zst") else path.stem


def kind_of_split(label: str) -> str:
    """Return train, validation or test; "" for another split."""
    words = [_WORDS[part] for part in _parts(label.rpartition("/")[2].lower()) if part in _WORDS]
    return words[0] if words else ""


def _rest(label: str) -> list[str]:
    """Return the words of a split's name besides its kind: ["sft"] for "train_sft"."""
    return [part for part in _parts(label.rpartition("/")[2].lower()) if part not in _WORDS]


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r"[\W\d_]+", text) if part and part != "v"]  # as in v2


def _with(labels: Iterable[str], kind: str) -> list[str]:
    return [label for label in labels if kind_of_split(label) == kind]


def _best(labels: Sequence[str], kinds: Sequence[str]) -> str | None:
    """Return the only split of the first kind present, or the one whose name is just the kind;
    otherwise the only split, or None if there are several candidates.
    """
    for kind in kinds:
        if of_kind := _with(labels, kind):
            bare = [label for label in of_kind if label.rpartition("/")[2] == kind]
            return (bare or of_kind)[0] if len(bare or of_kind) == 1 else None
    if TRAIN not in kinds and (of_kind := _with(labels, TRAIN)):
        return of_kind[0] if len(of_kind) == 1 else None
    return labels[0] if len(labels) == 1 else None


def _named(label: str, wanted: str | None, path: object) -> str:
    """Return the argument that names a split: of the training data, a source or a held-out set."""
    if wanted == TO_EVALUATE:
        name = label.rpartition("/")[2]
        return shlex.quote(f'data.eval_path={{{name}={{path="{path}", split="{label}"}}}}')
    if wanted == OF_A_SOURCE:
        return f'split="{label}", or split="{ALL}", of the source in data.mix'
    return f"data.split={label}, or data.split={ALL}"


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return f"{', '.join(labels[:_SHOWN])}{more}"
