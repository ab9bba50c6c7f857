"""Trackers and the JSON's monitors in a plan: packages, and who writes where."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.plan.plans import Planner

PACKAGES = ("tensorboard", "wandb", "mlflow", "comet_ml")
Installed = Callable[[bool], None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Have all the packages, or none."""
    find = importlib.util.find_spec

    def have(all_of_them: bool) -> None:
        monkeypatch.setattr(
            "importlib.util.find_spec",
            lambda name, *more: (
                (object() if all_of_them else None) if name in PACKAGES else find(name, *more)
            ),
        )

    return have


def test_missing_packages_are_problems_of_one_report(
    installed: Installed, planned: Planner
) -> None:
    installed(False)
    monitors = {"tensorboard": {"enabled": True, "output_path": "x"}, "comet": {"enabled": True}}
    words = "log.tensorboard=true log.wandb=p log.mlflow=e"
    assert set(planned.problems(words, monitors)) == {
        f"{key}: it needs the package {package}: pip install {package}"
        for key, package in (
            ("log.tensorboard is True", "tensorboard"),
            ("log.wandb is 'p'", "wandb"),
            ("log.mlflow is 'e'", "mlflow-skinny"),
            ("tensorboard.enabled is True ($ds.json)", "tensorboard"),
            ("comet.enabled is True ($ds.json)", "comet_ml"),
        )
    }
    made = planned("", {"tensorboard": {"enabled": False}})
    assert made.config.log.tensorboard is False


def test_a_monitor_without_a_place_of_its_own_becomes_a_tracker(
    installed: Installed, planned: Planner
) -> None:
    installed(True)
    ds = {"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "project": "p", "team": "t"}}
    made = planned("", ds)
    assert (made.config.log.tensorboard, made.config.log.wandb) == (True, "t/p")
    assert not made.deepspeed["tensorboard"]["enabled"]
    assert not made.deepspeed["wandb"]["enabled"]
    notes = "\n".join(planned.notes("", ds))
    assert "tensorboard.enabled is False, not True" in notes
    assert "log.wandb=t/p" in notes
    # The user's own tracker wins and is written once.
    made = planned("log.wandb=mine", {"wandb": {"enabled": True}})
    assert (made.config.log.wandb, made.deepspeed["wandb"]["enabled"]) == ("mine", False)


def test_a_monitor_with_a_place_of_its_own_stays_deepspeeds(
    installed: Installed, planned: Planner
) -> None:
    installed(True)
    ds = {
        "tensorboard": {"enabled": True, "output_path": "/logs"},
        "wandb": {"enabled": True, "group": "g"},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
    }
    made = planned("", ds)
    assert {name: made.deepspeed[name] for name in ds} == ds
    assert (made.config.log.tensorboard, made.config.log.wandb) == (False, None)


@pytest.mark.parametrize("folder", ["", "somewhere"])
def test_csv_files_are_written_beside_no_checkout(folder: str, planned: Planner) -> None:
    words = f"run.dir={folder}" if folder else ""
    monitor = planned(words, {"csv_monitor": {"enabled": True}}).deepspeed["csv_monitor"]
    assert monitor["output_path"] == (f"{folder}/monitors" if folder else "runs/monitors")
