"""Tests of what releases may break, in environments with the oldest and newest packages."""

from __future__ import annotations

import os
import subprocess
import tomllib

import pytest

from tests.gates.releases import REPOSITORY, build, folder, requirements

ROOMS = ("layout", "models", "engine", "checkpoint", "plan", "run", "gates/test_parity.py")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_newest_lifts_all_upper_bounds_but_those_that_are_kept() -> None:
    bounded = [line for line in requirements(PROJECT, lift=True) if "<" in line]
    assert {line.split(">")[0].split("<")[0] for line in bounded} == {"deepspeed", "ruff", "wandb"}
    assert "torch>=2.10" in requirements(PROJECT, lift=True)
    assert {"pytest>=8.3", "optuna>=5,<6"} <= {*requirements(PROJECT, lift=False)}


@pytest.mark.gate("oldest")
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_passes_with_the_oldest_packages(room: str) -> None:
    passes("oldest", room)


@pytest.mark.gate("newest")
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_passes_with_the_newest_packages(room: str) -> None:
    passes("newest", room)


def passes(name: str, room: str) -> None:
    """Run a folder's tests of `make test` in an environment, which is built if missing."""
    home = folder(name)
    if not (home / "bin" / "pytest").exists():
        build(name)
    environ = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    environ["TORCH_EXTENSIONS_DIR"] = str(home / "operators")  # built for that torch
    command = [home / "bin" / "python", "-m", "pytest", "-q", f"tests/{room}"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
