"""OUT, the folder of a cleaning: whose it is, who writes it, and its report."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from tools.cleaning.recipe import Recipe

if TYPE_CHECKING:
    from tools.cleaning.pipeline import Pipeline

_FORMAT = 1
"""Increase this if the same corpus and recipe would give other bytes."""


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep a second process out of OUT. Raises ConfigError if there is one."""
    with (out / "lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, none of the workers'
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"OUT: {out} is being written by another process: wait for it, or choose "
                    "another OUT"
                ) from None
        yield


def keep_identity(pipeline: Pipeline) -> None:
    """Write what is cleaned and how. Raises ConfigError if OUT holds another cleaning."""
    made_from = {
        "format": _FORMAT,
        "datatrove": version("datatrove"),
        "recipe": json.loads(pipeline.recipe.identity()),
        "corpus": pipeline.corpus.identity(),
        "columns": dict(pipeline.corpus.columns),
        **_files_of(pipeline.recipe),
        "tasks": len(pipeline.shards),
    }
    made_from = json.loads(json.dumps(made_from))
    path = pipeline.out / "made-from.json"
    if path.exists():
        before = json.loads(path.read_text())
        differs = [key for key in made_from if made_from[key] != before.get(key)]
        if differs:
            raise ConfigError(
                f"OUT: {pipeline.out} holds a cleaning with another {', '.join(differs)} "
                f"({path}): choose another OUT, or remove this one"
            )
        return
    if others := [of.name for of in pipeline.out.iterdir() if of.name != "lock"]:
        raise ConfigError(
            f"OUT: {pipeline.out} holds {others[0]}, which is not of this tool: choose another OUT"
        )
    temporary = path.with_name(".made-from.json")
    temporary.write_text(json.dumps(made_from))
    temporary.replace(path)


def _files_of(recipe: Recipe) -> dict[str, Any]:
    """Return names, sizes and modification times of the files that a recipe reads."""
    from harness.data.corpus import find_corpus
    from harness.files.splits import ALL

    read: dict[str, Any] = {}
    if recipe.decontaminate:
        corpora = [find_corpus(file, split=ALL) for file in recipe.decontaminate.files]
        read["evaluation data"] = [corpus.identity() for corpus in corpora]
    if recipe.bad_words and recipe.bad_words.file:
        read["list of words"] = _state(recipe.bad_words.file)
    if recipe.language and recipe.language.model:
        read["language model"] = _state(recipe.language.model)
    return read


def _state(file: str) -> list[int]:
    stat = Path(file).stat()
    return [stat.st_size, stat.st_mtime_ns]


def empty(folder: Path) -> None:
    """Remove what is in a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_report(pipeline: Pipeline) -> dict[str, Any]:
    """Write the report in three forms, once, and return it."""
    from harness.report.write import write_page
    from tools.cleaning.page import page_of
    from tools.cleaning.report import as_text, report_of

    path = pipeline.out / "report.json"
    if path.exists():
        return json.loads(path.read_text())
    report = report_of(pipeline, pipeline.out / "logs")
    (pipeline.out / "report.txt").write_text(as_text(report) + "\n", encoding="utf-8")
    write_page(pipeline.out / "report.html", page_of(report))
    write_page(path, json.dumps(report, indent=1))
    return report
