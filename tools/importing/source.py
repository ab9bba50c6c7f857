"""Source of an import: the engine's files, and their model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.run_config import run_and_step
from harness.errors import ConfigError, Unusable
from harness.files.regular_file import read_json
from harness.files.table import Table

_MOST_JSON_BYTES = 2**26


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, which may hold a tokenizer; `engine`: DeepSpeed's folder in it."""

    path: Path
    engine: Path
    model_config: dict[str, Any]


def find_source(text: str) -> Source:
    """The checkpoint that `text` names: the Trainer's output folder (its newest, or FOLDER@STEP),
    or a checkpoint's own folder.

    Raises ConfigError where there is none.
    """
    run, step = run_and_step(text)
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder")
    named = run.glob("checkpoint-*")
    numbered = {int(m[1]): path for path in named if (m := re.search(r"-(\d+)$", path.name))}
    if step is not None and step not in numbered:
        raise ConfigError(f"{run} has checkpoints of steps {sorted(numbered)}, not of {step}")
    path = numbered[step if step is not None else max(numbered)] if numbered else run
    engines = [p for p in path.glob("global_step*") if p.is_dir()]
    if len(engines) != 1:
        raise ConfigError(
            f"{path} is no checkpoint known here: the Trainer's hold one folder global_stepN"
        )
    return Source(path, engines[0], _model_config(path / "config.json"))


def _model_config(path: Path) -> dict[str, Any]:
    try:
        table = Table(read_json(path, _MOST_JSON_BYTES, links=True), path)
        table.text("model_type")
    except Unusable as error:  # its user can mend it
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return table.as_json()
