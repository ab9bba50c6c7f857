"""What is imported: where the engine's files are, and what is known of the run beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.manifest import PRECISIONS, TrainState
from harness.config.run_config import run_and_step
from harness.errors import ConfigError, Unusable
from harness.files.regular_file import read_json
from harness.files.table import Table

_MOST_JSON_BYTES = 2**26


@dataclass(frozen=True)
class Source:
    """`engine`: DeepSpeed's folder. `plan`: plan.json of a run of the harness; None of others.
    `tokenizer`: the folder that holds its files, beside others.

    `state` is complete for a run of the harness; else its samples are DeepSpeed's count, and its
    tokens what the Trainer counted.
    """

    path: Path
    engine: Path
    state: TrainState | None
    plan: dict[str, Any] | None
    model_config: dict[str, Any]
    tokenizer: Path


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
    folders = [p for p in path.glob("global_step*") if p.is_dir()]
    try:
        if (path / "state.json").is_file() and (path / "engine").is_dir():
            return _of_the_harness(path)
        if len(folders) == 1:
            return _of_the_trainer(path, folders[0])
    except Unusable as error:  # of a JSON file, which its user can mend
        raise ConfigError(str(error)) from error
    raise ConfigError(
        f"{path} is no checkpoint known here: the harness's hold state.json and engine/, the "
        "Trainer's one folder global_stepN"
    )


def _of_the_harness(path: Path) -> Source:
    run = path.parent.parent
    plan = _json(run / "plan.json")
    if "precision" in plan and (precision := plan.text("precision")) not in PRECISIONS:
        plan.refuse("precision", precision, f"one of {', '.join(PRECISIONS)}")
    given = _json(path / "state.json").table("state")
    state = TrainState(given.count("step"), given.count("samples"), given.count("tokens"))
    config = _model_config(plan.table("model_config"))
    return Source(path, path / "engine", state, plan.as_json(), config, run / "export")


def _of_the_trainer(path: Path, engine: Path) -> Source:
    return Source(path, engine, None, None, _model_config(_json(path / "config.json")), path)


def _model_config(table: Table) -> dict[str, Any]:
    table.text("model_type")
    return table.as_json()


def _json(path: Path) -> Table:
    try:
        return Table(read_json(path, _MOST_JSON_BYTES, links=True), path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
