"""Paths that users write, and the clone's own files, from any current folder."""

import os
import shlex
from argparse import ArgumentTypeError
from difflib import get_close_matches
from pathlib import Path

from harness.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
DS_CONFIGS, RUN_CONFIGS = ("ds_configs",), ("docs/recipes", "docs")
"""Folders of the clone whose JSONs and run configs are found by name from any folder."""
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_NEAR = 0.75
"""Minimum similarity of a misspelt name, without its suffixes: chat and chats have 0.89."""


def user_path(key: str, text: str) -> Path:
    """Return the path in `key` with ~ and ~user expanded. Raises ConfigError if it is invalid."""
    try:
        return Path(expanded_path(text))
    except ValueError as error:
        raise ConfigError(f"{key} is {text[:60]!r}: {error}") from None


def option_path(text: str) -> Path:
    """Return the path in a command-line option, with ~ and ~user expanded; for argparse."""
    try:
        text.encode()  # safetensors opens only UTF-8 names
        return Path(expanded_path(text))
    except UnicodeEncodeError:
        raise ArgumentTypeError(f"{text[:60]!r} has bytes that are not UTF-8") from None
    except ValueError as error:
        raise ArgumentTypeError(f"{text[:60]!r}: {error}") from None


def expanded_path(text: str) -> str:
    """Return a path with ~ and ~user expanded; other text, such as a hub id, stays unchanged.

    Raises ValueError for a path that no file can have.
    """
    if "\0" in text:
        raise ValueError("a path cannot contain a NUL character")
    if text.startswith("~"):
        try:
            text = str(Path(text).expanduser())
        except RuntimeError:
            user = text.partition("/")[0]
            raise ValueError(f"this machine has no home folder for {user}") from None
    if len(os.fsencode(text)) > _MAX_PATH_BYTES:
        raise ValueError(f"a path can have at most {_MAX_PATH_BYTES:,} bytes")
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in text.split("/")):
        raise ValueError(f"the name of a file or folder can have at most {_MAX_NAME_BYTES} bytes")
    return text


def shipped(path: Path, folders: tuple[str, ...]) -> Path:
    """Return `path`, or the clone's file if none is there: of `NAME`, or of its `FOLDER/NAME`."""
    if os.path.lexists(path):
        return path
    asked = (folder for folder in folders if str(path.parent) in (".", folder))
    files = (REPOSITORY / folder / path.name for folder in asked)
    return next((file for file in files if file.is_file()), path)


def not_found(what: str, path: Path, folders: tuple[str, ...]) -> str:
    """Return the problem that `shipped` found no file: where it looked, and the nearest names."""
    places = [REPOSITORY / folder for folder in folders]
    files = filter(None, (near_path(place / path.name) for place in places))
    near = [*filter(None, [near_path(path)]), *(file.name for file in files)]
    where = f" below {Path.cwd()} or in {' or '.join(map(str, places))}"
    hint = f"did you mean {' or '.join(map(str, near))}?" if near else "give an existing file"
    return f"there is no {what} {path}{where * (not path.is_absolute())}: {hint}"


def script(name: str, folder: str | Path = "") -> str:
    """Return a file of the clone as a shell in `folder` (default: the current one) names it."""
    file, here = REPOSITORY / name, Path(folder, name)
    return name if here.exists() and here.samefile(file) else shlex.quote(str(file))


def near_path(path: Path) -> Path | None:
    """Return an existing path that differs from `path` by misspelt names; None without one."""
    found = Path(path.anchor)
    try:
        for name in path.parts[bool(path.anchor) :]:
            near = name if (found / name).exists() else _near_name(name, found)
            if near is None:
                return None
            found /= near
    except OSError:  # a folder that cannot be listed
        return None
    return found


def _near_name(name: str, folder: Path) -> str | None:
    """Return the name in a folder that is most similar; suffixes count only between equals."""
    by_stem = dict[str, list[str]]()
    for path in sorted(folder.iterdir()):
        by_stem.setdefault(path.name.partition(".")[0], []).append(path.name)
    stems = get_close_matches(name.partition(".")[0], by_stem, n=1, cutoff=_NEAR)
    return get_close_matches(name, by_stem[stems[0]], n=1, cutoff=0)[0] if stems else None


def export_problem(folder: Path) -> str | None:
    """Return the reason why an export must not replace `folder`, or None."""
    if not folder.exists() or _is_export(folder):
        return None
    return f"{folder} exists and is not an exported model: move it, or choose another folder"


def _is_export(folder: Path) -> bool:
    """Return True for an empty folder or a model: replacing it loses no user files."""
    if not folder.is_dir():
        return False
    paths = list(folder.iterdir())
    configs = {folder / "config.json", folder / "adapter_config.json"}
    has_weights = any(path.suffix == ".safetensors" for path in paths)
    return not paths or (bool(configs & {*paths}) and has_weights)
