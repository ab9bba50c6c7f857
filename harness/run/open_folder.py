"""The run folder, opened by rank 0 and named to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.errors import CannotSave, ConfigError, ExitCode, is_full_disk
from harness.plan.plan import Plan
from harness.runfolder import RunFolder, create_run_dir


def open_folder(plan: Plan, say: Callable[[str], None]) -> RunFolder:
    """Choose and open the run folder on rank 0; every rank gets its path and attempt.

    Raises ConfigError or CannotSave on every rank if rank 0 cannot open it. Collective.
    """
    folder: RunFolder | None = None
    outcome: list[Any] = [None, 0, None, ExitCode.BAD_CONFIG]
    if plan.world.rank == 0:
        try:
            folder = _chosen(plan, say)
            outcome[:2] = str(folder.path), folder.attempt
        except (ConfigError, CannotSave, OSError) as error:
            outcome[2] = f"run.dir={plan.config.run.dir}: {error}"
            if is_full_disk(error):
                outcome[3] = ExitCode.CANNOT_SAVE
    dist.broadcast_object_list(outcome)
    path, attempt, problem, code = outcome
    if problem is not None:
        raise CannotSave(problem) if code == ExitCode.CANNOT_SAVE else ConfigError(problem)
    if folder is None:
        folder = RunFolder(path)
        folder.attempt = attempt
    return folder


def _chosen(plan: Plan, say: Callable[[str], None]) -> RunFolder:
    """Return the run folder, created if needed, locked, and open for writing."""
    json_name = Path(plan.deepspeed_source).stem
    path = plan.config.run.dir or create_run_dir(plan.config.model.name, json_name, datetime.now())
    folder = RunFolder(path)
    stale_owner = folder.open()
    if stale_owner is not None:
        folder.append_event("stale_lock", owner=str(stale_owner))
    for problem in folder.damaged:
        folder.append_event("damaged_record", message=problem)
        say(f"not needed, not used: {problem}")
    return folder
