"""Sweeps of small real runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, environment

STEPS = 32
_RUN = (*SMALL_MODEL, *SHORT_RUN, "train.global_batch=64", "train.micro_batch=32")
_RUN += (f"train.steps={STEPS}", "optim.warmup_steps=4", "eval.every=4")


def write_sweep(folder: Path, name: str, settings: str, search: str, words: list[str]) -> Path:
    """Write a sweep of small runs."""
    tables = dict(word.partition("=")[::2] for word in [*_RUN, *words])
    lines = [f"{key} = {_quoted(value)}" for key, value in tables.items()]
    path = folder / f"{name}.toml"
    # Dotted keys before the first table.
    path.write_text("\n".join([*lines, "[sweep]", settings, "[search]", search]) + "\n")
    return path


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[\d.]+|true|false", value) else json.dumps(value)


def start(path: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    """Start a sweep in its file's folder; `variables` change its environment."""
    return subprocess.Popen(
        [sys.executable, REPOSITORY / "tools" / "sweep.py", path.name, *options],
        cwd=path.parent,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Return the output of a sweep that must end with `code`."""
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == code, output
    return output
