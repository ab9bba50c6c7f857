"""Copies a tokenizer's files out of a folder, without links, code and other files."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.errors import Unusable
from harness.files.regular_file import open_regular

GENERATION = "generation_config.json"

# Files that transformers' tokenizers write and read, without code.
_NAMES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("*.model", "*.spm", "*.tiktoken", "vocab.*", "vocab-*.json", "merges.txt", "bpe.codes"),
    *("normalizer.json", "tekken.json", GENERATION),
)
_TEMPLATES = "additional_chat_templates"  # a folder of *.jinja


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder holds files of a tokenizer."""
    return any(any(folder.glob(name)) for name in _NAMES if name != GENERATION)


def copy_tokenizer(source: Path, folder: Path, with_code: bool = False) -> list[str]:
    """Copy a tokenizer's files; return the names left out: links and other irregular files, names
    that no tokenizer has and, without `with_code`, code.

    A run from somebody else may hold anything, and the copy is shared.
    """
    left = _copy(source, folder, (*_NAMES, *(("*.py",) if with_code else ())))
    templates = source / _TEMPLATES
    if templates.is_dir() and not templates.is_symlink():
        (folder / _TEMPLATES).mkdir()
        within = _copy(templates, folder / _TEMPLATES, ("*.jinja",))
        left = [name for name in left if name != _TEMPLATES]
        left += [f"{_TEMPLATES}/{name}" for name in within]
    return left


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Copy the regular files that match; return the names of all others."""
    left = []
    for path in sorted(source.iterdir()):
        try:
            if not any(map(path.match, patterns)):
                raise Unusable(path.name)
            file = open_regular(path)
        except Unusable:
            left.append(path.name)
            continue
        with file, (folder / path.name).open("xb") as copy:
            shutil.copyfileobj(file, copy)
    return left
