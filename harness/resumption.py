"""Where a run begins: at step 0, or with the newest usable checkpoint of it or of another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.checkpoint.load import Checkpoint, checkpoint_of, is_run, newest_usable
from harness.checkpoint.resume import branch_problems, changed_keys, resume_problems
from harness.config import run_and_step
from harness.errors import ConfigError, NoCheckpoint, Unusable
from harness.plan import Plan
from harness.runfolder import RunFolder


@dataclass(frozen=True)
class Beginning:
    """What a run goes on from. `kind`: resumed (this run), branched (another one) or weights (of
    another one, for a run that begins at step 0). `problems`: newer checkpoints that are unusable.
    """

    checkpoint: Checkpoint | None = None
    kind: str = "new"
    changes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find_beginning(plan: Plan, record: dict[str, Any]) -> Beginning:
    """What `plan` goes on from; all ranks call it. `record`: what plan.json would hold.

    Raises ConfigError on all ranks where this plan may not go on from there, and NoCheckpoint where
    there are checkpoints but none can be used: a run with checkpoints never starts over by itself.
    """
    own = plan.run.run.dir
    if own is not None and (found := _own(plan, RunFolder(own), record)) is not None:
        return found
    if plan.run.resume.from_ is not None:
        return _branch(plan, plan.run.resume.from_, record)
    if plan.run.model.init_from is not None and is_run(plan.run.model.init_from):
        return Beginning(_checkpoint_of(plan.run.model.init_from, "model.init_from"), "weights")
    return Beginning()


def _own(plan: Plan, folder: RunFolder, record: dict[str, Any]) -> Beginning | None:
    """The newest usable checkpoint of the run in run.dir; None where it has none yet."""
    saved = _of_rank_0(folder.read_plan())
    problems = resume_problems(saved, record, plan.run.resume.allow) if saved else []
    checkpoint, unusable = newest_usable(folder.checkpoints_dir)
    if checkpoint is not None and checkpoint.state.step > record["total_steps"]:
        problems.append(
            f"the run has {record['total_steps']} steps, but its newest checkpoint is of step "
            f"{checkpoint.state.step}: set train.steps to that or more, or remove later checkpoints"
        )
    if problems:
        raise ConfigError([f"{folder.path}: {problem}" for problem in problems])
    if checkpoint is None:
        if unusable:
            raise NoCheckpoint([f"{folder.path} has no usable checkpoint: {p}" for p in unusable])
        return None
    changes = changed_keys(saved, record) if saved else []
    return Beginning(checkpoint, "resumed", changes, unusable)


def _branch(plan: Plan, text: str, record: dict[str, Any]) -> Beginning:
    """A checkpoint of another run, for a run with other hyperparameters."""
    run, _ = run_and_step(text)
    own = plan.run.run.dir
    if own is not None and Path(own).expanduser().resolve() == run.resolve():
        raise ConfigError(f"resume.from={text} is run.dir itself: give the branch its own run.dir")
    saved = _of_rank_0(RunFolder(run).read_plan())
    checkpoint = _checkpoint_of(text, "resume.from")
    before = saved or {
        "model_config": checkpoint.manifest.model_config,
        "data_fingerprint": checkpoint.manifest.data_fingerprint,
        "precision": checkpoint.manifest.precision,
        "run": {},
    }
    problems = branch_problems(before, record, plan.run.resume.allow)
    if checkpoint.state.step > record["total_steps"]:
        problems.append(
            f"it has {checkpoint.state.step} steps behind it, train.steps={record['total_steps']}"
        )
    if problems:
        raise ConfigError([f"resume.from={text}: {problem}" for problem in problems])
    return Beginning(checkpoint, "branched", changed_keys(before, record))


def _checkpoint_of(text: str, key: str) -> Checkpoint:
    try:
        return checkpoint_of(text)
    except Unusable as error:
        raise NoCheckpoint(f"{key}={text}: {error}") from error


def load_into(engine: Any, checkpoint: Checkpoint, weights_only: bool = False) -> None:
    """Give the engine a checkpoint's weights and, but for `weights_only`, the rest; collective.

    Raises NoCheckpoint where it lacks something that this model has.
    """
    problem = None
    try:
        reader = checkpoint.reader()
        engine.restore(reader.fill, reader.optimizer_kinds if not weights_only else lambda _: ())
    except Unusable as error:
        problem = f"{error}: it was saved from another model"
    except Exception as error:  # whatever it is, the other ranks wait in the next line
        problem = f"{checkpoint.path} cannot be loaded: {type(error).__name__}: {error}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, problem)
    for found in filter(None, told):
        raise NoCheckpoint(found)
    engine.refresh_weights()
    if not weights_only:
        engine.restore_scalars(checkpoint.manifest.engine)


def _of_rank_0(value: Any) -> Any:
    """Folders may be seen differently, or at different times: rank 0 looks for all."""
    held = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]
