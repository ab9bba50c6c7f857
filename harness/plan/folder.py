"""The run folder and the experiment trackers of a plan; the JSON's own monitors are turned off."""

import importlib.util
from pathlib import Path
from typing import Any

from harness.files.paths import export_problem
from harness.plan.plan import Draft


def check_run_dir(draft: Draft) -> None:
    """Reject a run.dir that is, or is inside, a file and, on this machine, one that this user may
    not enter, or whose export would replace something else. Reads this machine's disk.
    """
    text = draft.config.run.dir
    if text is None:
        return
    path = Path(text).absolute()
    try:
        nearest = next((place for place in (path, *path.parents) if place.exists()), path)
    except OSError as error:  # no permission, which another machine may give
        if draft.here:
            draft.problems.add("run.dir", f"but it cannot be reached: {error.strerror}")
        return
    if nearest.exists() and not nearest.is_dir():
        blocking = "it" if nearest == path else str(nearest)
        draft.problems.add("run.dir", f"but {blocking} is not a folder")
    problem = export_problem(path / "export") if draft.here and draft.config.save.export else None
    if problem:
        draft.problems.say(f"save.export: {problem}, or set save.export=false")


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Names for pip install, by import name."""


def adopt_monitors(draft: Draft) -> None:
    """Replace the JSON's monitors by the run's own trackers, which write to the run folder.

    DeepSpeed's TensorBoard and Weights & Biases monitors count samples and do not know the run
    folder. A monitor with its own output_path or group stays with DeepSpeed.
    """
    ds = draft.ds
    if ds.literal("tensorboard.enabled") is True and not ds.literal("tensorboard.output_path"):
        _adopt(draft, "tensorboard", True)
    if ds.literal("wandb.enabled") is True and ds.literal("wandb.group") is None:
        team, project = ds.literal("wandb.team"), ds.value("wandb.project")
        _adopt(draft, "wandb", f"{team}/{project}" if team else project)
    if ds.literal("csv_monitor.enabled") is True and not ds.literal("csv_monitor.output_path"):
        place = f"{draft.config.run.dir or 'runs'}/monitors"
        why = "otherwise it would be written next to this checkout"
        ds.set("csv_monitor.output_path", place, why)


def check_trackers(draft: Draft) -> None:
    """Reject trackers and monitors whose packages are not installed on this machine."""
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


def _adopt(draft: Draft, name: str, value: Any) -> None:
    """Set log.NAME unless the user did, and turn the JSON's monitor off to avoid logging twice."""
    key = f"log.{name}"
    if not draft.config.is_set(key):
        draft.config = draft.config.changed({key: value})
    own = getattr(draft.config.log, name)
    why = f"the run logs to its own folder, by step: {key}={str(own).lower()}"
    draft.ds.set(f"{name}.enabled", False, why)
