"""What is imported: where the engine's files are, and what is known of the run beside them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.manifest import TrainState
from harness.config import run_and_step
from harness.errors import ConfigError

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "*.model", "vocab.*")


@dataclass(frozen=True)
class Source:
    """`engine`: DeepSpeed's folder. `plan`: plan.json of a run of the harness; None of others.

    `state` is complete for a run of the harness; else its samples are DeepSpeed's count, and its
    tokens what the Trainer counted.
    """

    path: Path
    engine: Path
    state: TrainState | None
    plan: dict[str, Any] | None
    model_config: dict[str, Any]
    tokenizer: list[Path]


def find_source(text: str) -> Source:
    """The checkpoint that `text` names: a run of an earlier harness (RUN, RUN@STEP), the Trainer's
    output folder (its newest), or a checkpoint's own folder of either.

    Raises ConfigError where there is none.
    """
    run, step = run_and_step(text)
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder")
    named = [
        path for pattern in ("checkpoints/step-*", "checkpoint-*") for path in run.glob(pattern)
    ]
    numbered = {int(m[1]): path for path in named if (m := re.search(r"-(\d+)$", path.name))}
    if step is not None and step not in numbered:
        raise ConfigError(f"{run} has checkpoints of steps {sorted(numbered)}, not of {step}")
    path = numbered[step if step is not None else max(numbered)] if numbered else run
    if (path / "state.json").is_file() and (path / "engine").is_dir():
        return _of_the_harness(path)
    folders = [p for p in path.glob("global_step*") if p.is_dir()]
    if len(folders) == 1:
        return _of_the_trainer(path, folders[0])
    raise ConfigError(
        f"{path} is no checkpoint known here: the harness's hold state.json and engine/, the "
        "Trainer's one folder global_stepN"
    )


def _of_the_harness(path: Path) -> Source:
    run = path.parent.parent
    plan = _json(run / "plan.json")
    state = TrainState(**_json(path / "state.json")["state"])
    return Source(
        path, path / "engine", state, plan, plan["model_config"], _tokenizer(run / "export")
    )


def _of_the_trainer(path: Path, engine: Path) -> Source:
    return Source(path, engine, None, None, _json(path / "config.json"), _tokenizer(path))


def _tokenizer(folder: Path) -> list[Path]:
    return sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern)})


def _json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return value
