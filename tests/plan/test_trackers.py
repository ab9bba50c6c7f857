"""Trackers and the JSON's monitors in a plan: packages, and who writes where."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.plan.command import parse_command, plan_from
from harness.plan.plan import Plan

CPU = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hide packages."""
    find = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name in names else find(name, *a)
        )

    return hide


@pytest.fixture
def with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())


def planned(tmp_path: Path, ds: dict[str, Any], *assignments: str) -> Plan:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds))
    return plan_from(parse_command(["--deepspeed", str(path), *assignments]), CPU)


def test_missing_packages_are_problems_of_one_report(without: Any, tmp_path: Path) -> None:
    without("tensorboard", "wandb", "mlflow", "comet_ml")
    monitors = {"tensorboard": {"enabled": True, "output_path": "x"}, "comet": {"enabled": True}}
    path = tmp_path / "ds.json"
    with pytest.raises(ConfigError) as raised:
        planned(tmp_path, monitors, "log.tensorboard=true", "log.wandb=p", "log.mlflow=e")
    for key, package in (
        ("log.tensorboard is True (command line)", "tensorboard"),
        ("log.wandb is 'p' (command line)", "wandb"),
        ("log.mlflow is 'e' (command line)", "mlflow-skinny"),
        (f"tensorboard.enabled is True ({path})", "tensorboard"),
        (f"comet.enabled is True ({path})", "comet_ml"),
    ):
        problem = f"{key}: it needs the package {package}: pip install {package}"
        assert problem in raised.value.problems


def test_what_nobody_asks_for_need_not_be_there(without: Any, tmp_path: Path) -> None:
    without("tensorboard", "wandb", "mlflow", "comet_ml")
    made = planned(tmp_path, {"tensorboard": {"enabled": False}})
    assert made.config.log.tensorboard is False


@pytest.mark.usefixtures("with_all")
def test_a_monitor_without_a_place_of_its_own_becomes_a_tracker(tmp_path: Path) -> None:
    ds = {"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "project": "p", "team": "t"}}
    made = planned(tmp_path, ds)
    assert (made.config.log.tensorboard, made.config.log.wandb) == (True, "t/p")
    assert not made.deepspeed["tensorboard"]["enabled"]
    assert not made.deepspeed["wandb"]["enabled"]
    messages = [event.get("message", "") for event in made.events]
    assert any("tensorboard.enabled is False, not True" in message for message in messages)
    assert any("log.wandb=t/p" in message for message in messages)


@pytest.mark.usefixtures("with_all")
def test_the_users_own_tracker_wins_and_is_written_once(tmp_path: Path) -> None:
    made = planned(tmp_path, {"wandb": {"enabled": True}}, "log.wandb=mine")
    assert made.config.log.wandb == "mine"
    assert not made.deepspeed["wandb"]["enabled"]


@pytest.mark.usefixtures("with_all")
def test_a_monitor_with_a_place_of_its_own_stays_deepspeeds(tmp_path: Path) -> None:
    ds = {
        "tensorboard": {"enabled": True, "output_path": "/logs"},
        "wandb": {"enabled": True, "group": "g"},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
    }
    made = planned(tmp_path, ds)
    assert {name: made.deepspeed[name] for name in ds} == ds
    assert (made.config.log.tensorboard, made.config.log.wandb) == (False, None)


def test_csv_files_are_written_beside_no_checkout(tmp_path: Path) -> None:
    ds = {"csv_monitor": {"enabled": True}}
    made = planned(tmp_path, ds, f"run.dir={tmp_path}/run")
    assert made.deepspeed["csv_monitor"]["output_path"] == f"{tmp_path}/run/monitors"
    assert planned(tmp_path, ds).deepspeed["csv_monitor"]["output_path"] == "runs/monitors"
