"""Determines the kind of a file from its name or, failing that, from its first bytes."""

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Literal

from harness.files import formats
from harness.files.data_format import DataFormat
from harness.files.first_bytes import BY_SUFFIX, GET_LFS, is_lfs_pointer, why_not_text

# "binary" files in a folder are skipped; "data" files are always rejected.
FileKind = Literal["documents", "data", "binary"]


_FORMATS: list[DataFormat] = [
    import_module(f"{formats.__name__}.{module.name}").FORMAT
    for module in pkgutil.iter_modules(formats.__path__)
]
FORMATS = {
    format.name: format
    for format in sorted(_FORMATS, key=lambda format: (format.count is not None, format.name))
}
"""Every format by name; formats in which a file is one document come first."""
_OF_SUFFIX = {suffix: format for format in FORMATS.values() for suffix in format.suffixes}


def format_of(file: Path, named: str | None) -> DataFormat:
    """Return the named format, or else the one of the file's suffix, or else text."""
    return known_format(file, named) or FORMATS["text"]


def known_format(file: Path, named: str | None) -> DataFormat | None:
    """Return the named format, or else the one of the file's suffix, or else None."""
    if named is not None:
        return FORMATS[named]
    parts = [part.lower() for part in file.suffixes or [file.suffix]]
    endings = ("".join(parts[start:]) for start in range(len(parts)))  # .jsonl.gz before .gz
    return next((_OF_SUFFIX[ending] for ending in endings if ending in _OF_SUFFIX), None)


def kind_of(file: Path, named: str | None) -> tuple[FileKind, str]:
    """Return the kind of a file and, for "data" and "binary", the reason and advice.

    Opens the file only if it is tiny or its suffix does not determine its kind. Raises OSError.
    """
    format = known_format(file, named)
    if is_lfs_pointer(file):
        is_named = format is not None or file.suffix.lower() in BY_SUFFIX
        return "data" if is_named else "binary", f"is {GET_LFS}"
    if format is not None:
        why_not = format.why_not(file, named is not None)
    elif advice := BY_SUFFIX.get(file.suffix.lower()):
        return "data", advice
    else:
        unknown = f"has the unknown suffix {file.suffix}: data.format=text reads it as text"
        why_not = why_not_text(file) or unknown
    if not why_not:
        return "documents", ""
    return ("binary" if why_not_text(file) else "data"), why_not
