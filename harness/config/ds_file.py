"""Reads a DeepSpeed JSON from file and command line; recognises configs of other programs."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.config.assignments import MAX_FILE_BYTES, assign_all, beyond_bounds
from harness.config.ds_json import DsJson, first_name, use_first_names
from harness.errors import ConfigError, shortened
from harness.files.regular_file import read_regular

_FILE = Path(__file__).with_name("foreign.toml")
_ENOUGH = 3
"""Number of a program's keys that identify its config; one or two may be a coincidence."""


@functools.cache
def _kinds() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def foreign_config(path: object, keys: Iterable[str], wanted: str) -> str | None:
    """Return a problem if top-level `keys` are those of another kind of config than `wanted`."""
    plain = {key.replace("-", "_") for key in keys}
    kinds = _kinds()
    hits = {kind: len(plain & set(table["keys"].split())) for kind, table in kinds.items()}
    kind = max((kind for kind in hits if kind != wanted), key=lambda kind: hits[kind])
    if hits[kind] < max(_ENOUGH, hits[wanted] + 1):
        return None
    table = kinds[kind]
    problem = f"{path} is {table['name']}, not {kinds[wanted]['name']}"
    if option := table.get("option"):
        return f"{problem}: give it with {option}"
    places = [f"{key} is {place}" for key, place in table["here"].items() if key in plain]
    instead = "write its settings"
    if wanted == "deepspeed":
        instead = "give --deepspeed one of ds_configs/, and write the other settings"
    replacements = f" ({'; '.join(places)})" if places else ""
    return f"{problem}: {instead} as keys of the run config{replacements}"


def top_level_keys(text: str) -> list[str]:
    """Return the keys and TOML tables at line starts of a text that could not be parsed."""
    matches = re.findall(
        r"""^[ \t]{0,4}(?:\[([\w-]+)\]|["']?([A-Za-z_][\w-]*)["']?[ \t]*[:=])""", text, re.MULTILINE
    )
    return [table or key for table, key in matches]


PREFIX = "ds."
"""Prefix of the JSON's keys on the command line."""


def load_ds_json(path: Path, assignments: Iterable[str] = ()) -> tuple[DsJson, list[str]]:
    """Return the file's JSON with `key=value` applied, and all problems of both."""
    problems: list[str] = []
    tree: dict[str, Any] = {}
    try:
        tree = read_ds_json(path)
        problems += use_first_names(tree, str(path))
    except ConfigError as error:
        problems += error.problems
    assigned, rejected = assign_all(tree, map(_with_first_name, assignments))
    problems += [f"{PREFIX}{problem}" for problem in rejected]
    return DsJson(tree, str(path), assigned), problems


def _with_first_name(assignment: str) -> str:
    """Return `key=value` under the key's canonical name, so that it overrides the file's."""
    key, equals, value = assignment.partition("=")
    return first_name(key.strip()) + equals + value


def read_ds_json(path: str | Path) -> dict[str, Any]:
    """Return the file as a dict. Raises ConfigError if it is missing, not JSON, not an object, has
    duplicate keys, exceeds the limits of a config, or is another program's config.
    """
    problems: list[str] = []

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                problems.append(f"{path} has {key} {times} times in one object: keep one of them")
        return dict(pairs)

    text = ""
    try:
        text = read_regular(Path(path), MAX_FILE_BYTES, links=True).decode()
        content = json.loads(
            text, object_pairs_hook=without_duplicates, parse_constant=_no_constant
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no DeepSpeed JSON {path}: give --deepspeed an existing file, such as one "
            f"of ds_configs/"
        ) from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        problem = foreign_config(path, top_level_keys(text), "deepspeed")
        raise ConfigError(problem or f"{where} is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"DeepSpeed JSON {path} is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed JSON {path} cannot be read: {error}") from None
    if problem := beyond_bounds(content):
        raise ConfigError(f"DeepSpeed JSON {path}: {problem}")
    if not isinstance(content, dict):
        problems.append(f"DeepSpeed JSON {path} holds {shortened(content)}, not an object {{...}}")
    elif problem := foreign_config(path, content, "deepspeed"):
        raise ConfigError(problem)
    if problems:
        raise ConfigError(problems)
    return dict(content)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a valid JSON number")
