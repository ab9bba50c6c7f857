"""Trackers of a plan (log.tensorboard, log.wandb, log.mlflow) and the JSON's own monitors."""

from __future__ import annotations

import importlib.util
from typing import Any

from harness.plan.draft import Draft

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What pip installs, by the name that is imported."""


def adopt_monitors(draft: Draft) -> None:
    """Let the run write what the JSON's monitors would write beside this checkout.

    DeepSpeed's TensorBoard and Weights & Biases monitors count samples and know no run folder; one
    with an output_path or a group of the user's own stays DeepSpeed's.
    """
    ds = draft.ds
    if ds.literal("tensorboard.enabled") is True and not _has_place(draft, "tensorboard"):
        _adopt(draft, "tensorboard", True)
    if ds.literal("wandb.enabled") is True and ds.literal("wandb.group") is None:
        team, project = ds.literal("wandb.team"), ds.value("wandb.project")
        _adopt(draft, "wandb", f"{team}/{project}" if team else project)
    if ds.literal("csv_monitor.enabled") is True and not _has_place(draft, "csv_monitor"):
        place = f"{draft.config.run.dir or 'runs'}/monitors"
        ds.set("csv_monitor.output_path", place, "it would be written beside this checkout")


def check_trackers(draft: Draft) -> None:
    """Refuse trackers and monitors whose packages are not installed on this machine."""
    if not draft.here:
        return
    config, ds = draft.config.log, draft.ds
    for name, package in PACKAGES.items():
        if getattr(config, name) and not importlib.util.find_spec(name):
            draft.problems.add(f"log.{name}", _needs(package))
    for name, module in {"tensorboard": "", "wandb": "", "comet": "comet_ml"}.items():
        if ds.literal(f"{name}.enabled") is True and not importlib.util.find_spec(module or name):
            draft.problems.add(f"{name}.enabled", _needs(module or name))


def _needs(package: str) -> str:
    return f"it needs the package {package}: pip install {package}"


def _has_place(draft: Draft, monitor: str) -> bool:
    return bool(draft.ds.literal(f"{monitor}.output_path"))


def _adopt(draft: Draft, name: str, value: Any) -> None:
    """Set log.NAME, unless the user did, and turn the JSON's monitor off: once is enough."""
    key = f"log.{name}"
    if not draft.config.is_set(key):
        log = draft.config.log.model_copy(update={name: value})
        draft.config = draft.config.model_copy(update={"log": log})
    own = getattr(draft.config.log, name)
    why = f"the run writes it into its folder, by steps: {key}={str(own).lower()}"
    draft.ds.set(f"{name}.enabled", False, why)
