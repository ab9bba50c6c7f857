"""Reads a RunConfig from a TOML file and the command line, reporting all mistakes at once."""

import functools
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from harness.config import own
from harness.config.assignments import (
    COMMAND_LINE,
    MAX_FILE_BYTES,
    NAMED_AT_ONCE,
    assign,
    assign_all,
    beyond_bounds,
    did_you_mean,
    flat,
    listed,
    parsed_toml,
)
from harness.config.ds_json import foreign_config, top_level_keys
from harness.config.run_config import RunConfig, allow_problems, known_keys, origin_of
from harness.config.sections import LENGTHS, RECORDED
from harness.errors import ConfigError, worded
from harness.files.paths import RUN_CONFIGS, not_found, shipped
from harness.files.regular_file import read_regular


def load_run_config(path: str | Path | None, assignments: Iterable[str] = ()) -> RunConfig:
    """Return the RunConfig: defaults, then the TOML file (if any), then `key=value`. Run the
    file of the user's own code that they name (run.code).

    Raises ConfigError with all problems of the file and the command line.
    """
    problems: list[str] = []
    tree: dict[str, Any] = {}
    try:
        tree = read_toml(Path(path)) if path is not None else {}
    except ConfigError as error:
        problems += error.problems
    origins = {key: str(path) for key, _ in flat(tree)}
    assigned, rejected = assign_all(tree, assignments, RunConfig.model_fields)
    if any(key in LENGTHS for key in assigned):
        for key in set(LENGTHS) - set(assigned):
            if isinstance(train := tree.get("train"), dict):
                train.pop(key.removeprefix("train."), None)
            origins.pop(key, None)
    origins |= dict.fromkeys(assigned, COMMAND_LINE)
    problems += rejected
    code, context = tree.get("run"), None
    code = code.get("code") if isinstance(code, dict) else None
    try:
        own.load(code if isinstance(code, str) else None, origin_of("run.code", origins))
    except ConfigError as error:
        problems += error.problems
        context = RECORDED  # the names that it would have added are no further problems
    try:
        run = validated(tree, origins, context)
        problems += allow_problems(run)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return run


def validated(
    tree: Mapping[str, Any], origins: Mapping[str, str], context: dict[str, bool] | None = None
) -> RunConfig:
    """Return the RunConfig for a nested dict; `origins` holds the origin of each dotted key.
    `context`: RECORDED, or None.

    Raises ConfigError.
    """
    try:
        return RunConfig.model_validate(tree, context=context).with_origins(origins)
    except ValidationError as error:
        raise ConfigError(_sentences(error.errors(), origins)) from None


def with_values(run: RunConfig, values: Mapping[str, Any], origins: Mapping[str, str]) -> RunConfig:
    """Return a copy with other values of dotted keys and their origins. Raises ConfigError."""
    tree = run.model_dump(exclude_unset=True)
    for key, value in values.items():
        assign(tree, key, value)
    return validated(tree, {**run.origins(), **origins})


def read_toml(path: Path, what: str = "run config") -> dict[str, Any]:
    """Return the unvalidated run config of a file, or of the shipped one of that name.

    Raises ConfigError.
    """
    text, path = "", shipped(path, RUN_CONFIGS)
    try:
        text = read_regular(path, MAX_FILE_BYTES, links=True).decode().removeprefix("\ufeff")
        tree = parsed_toml(text)
    except FileNotFoundError:
        raise ConfigError(not_found(what, path, RUN_CONFIGS)) from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line (\d+)", str(error))
        line = f":{where.group(1)}" if where else ""
        problem = foreign_config(path, top_level_keys(text), "run")
        raise ConfigError(problem or f"{path}{line} is not valid TOML: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"run config {path} cannot be read: {error}") from None
    if problem := beyond_bounds(tree):
        raise ConfigError(f"run config {path}: {problem}")
    if problem := foreign_config(path, tree, "run"):
        raise ConfigError(problem)
    return tree


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_MOVED: dict[str, str] = _TABLES["moved"]
_FORMS: dict[str, str] = _TABLES["forms"]
"""Spelling of the values that pydantic expects, by error type."""
_KINDS: dict[str, str] = _TABLES["kinds"]
"""The expected values in TOML terms, by pydantic error type."""
_MEANT: dict[str, dict[str, str]] = _TABLES["meant"]
"""What to write instead of a value of another type, by error type of pydantic and key."""
_STRUCTURE = (*_KINDS, "missing", "extra_forbidden", "string_type")
"""Errors about the structure of a value."""
EXAMPLES: dict[str, str] = _TABLES["examples"]
"""An example value for every key that is a list or a table."""


def _sentences(items: list[ErrorDetails], origins: Mapping[str, str]) -> list[str]:
    """Return one sentence per error; many unknown keys from the same origin share a sentence."""
    sentences, unknown = [], dict[str, dict[str, str]]()
    for item in items:
        sentence, key = _sentence(item, origins), ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden" and "did you mean" not in sentence:
            unknown.setdefault(origin_of(key, origins), {})[key] = sentence
        else:
            sentences.append(sentence)
    for origin, by_key in unknown.items():
        if len(by_key) <= NAMED_AT_ONCE:
            sentences += by_key.values()
        else:
            sentences.append(
                f"{len(by_key)} keys ({origin}) are not in the run config: {listed(by_key)}"
            )
    return sentences


def _sentence(item: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Return a pydantic error as a sentence: key, value, origin and problem."""
    key, kind = ".".join(map(str, item["loc"])), item["type"]
    origin = origin_of(key, origins)
    whole = next((name for name in EXAMPLES if f"{key}.".startswith(f"{name}.")), "")
    form = _form(whole, origin) if whole and kind in _STRUCTURE else ""
    if kind == "extra_forbidden":
        hint = _MOVED.get(key) or _other_name(key)
        hint = hint or did_you_mean(key, [*RunConfig.model_fields, *known_keys()])
        return f"{key} ({origin}) is not a key of {whole or 'the run config'}{form or hint}"
    if kind == "value_error":  # raised by a validator of a whole section
        return f"{item['ctx']['error']} ({origin})"
    if kind == "missing":
        return f"{key} ({origin}) is missing{form}"
    if meant := _MEANT.get(kind, {}).get(key):
        return worded(key, item["input"], origin, f"it must be {meant}")
    must_be = _KINDS.get(kind) or item["msg"].replace("Input should be", "it must be")
    if kind == "literal_error":
        names = re.findall("'([^']+)'", item["ctx"]["expected"])
        form = did_you_mean(str(item["input"]), names)
    return worded(key, item["input"], origin, must_be + (form or _FORMS.get(kind, "")))


@functools.cache
def other_names() -> dict[str, str]:
    """Return our key for each name that other trainers give it (other_names.toml)."""
    path = Path(__file__).with_name("other_names.toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: ours for ours, names in table.items() for name in names.split()}


def _other_name(key: str) -> str:
    """Return "; did you mean X?" if the last word of a key is another trainer's name for X, or that
    X is not supported.
    """
    ours = other_names().get(key.rpartition(".")[2].replace("-", "_"), "")
    return ours if ours.startswith(":") or not ours else f"; did you mean {ours}?"


def _form(whole: str, origin: str) -> str:
    """Return an example of a list or table, quoted so that a shell keeps its own quotes."""
    form = f"{whole}={EXAMPLES[whole]}"
    return f", as in {shlex.quote(form) if COMMAND_LINE in origin else form}"
