"""Finds the checkpoint from which a run continues; imports no torch, for dry runs."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.collectives import broadcast_object, rank_and_ranks
from harness.checkpoint.compatibility import (
    asked,
    branch_problems,
    changed_keys,
    has_sections,
    resume_problems,
    too_short,
)
from harness.checkpoint.manifest import Checkpoint
from harness.checkpoint.store import RESTORE, Store, checkpoint_of, newest_usable
from harness.config.run_config import run_and_step
from harness.errors import ConfigError, NoCheckpoint, Unusable
from harness.files.records import Unreadable
from harness.plan.batches import open_keys
from harness.plan.make import with_facts
from harness.plan.plan import Facts, Plan
from harness.plan.weights import has_checkpoints
from harness.runfolder import RunFolder


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run starts.

    `kind`: new (no checkpoint), resumed (this run's), branched (another run's) or weights (another
    run's weights, starting at step 0). `problems`: newer checkpoints that are unusable. `damages`:
    unreadable records that are not needed. `steps_before`: steps that the run had, if known.
    """

    checkpoint: Checkpoint | None = None
    kind: str = "new"
    changes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damages: list[str] = field(default_factory=list)
    steps_before: int | None = None

    def text(self, plan: Plan, total_steps: int) -> str:
        """Describe the checkpoint that a run continues from, and changes of its length or ranks."""
        assert self.checkpoint is not None
        about, now = self.checkpoint.manifest.about, division(plan)
        text = f"{self.kind} {self.checkpoint.path.name} of {total_steps} steps"
        if self.steps_before not in (None, total_steps):
            follows = plan.config.optim.schedule not in ("constant", "inverse_sqrt")
            rate = ": the learning rate follows the new length" if follows else ""
            text += f" ({self.steps_before} before{rate})"
        differs = any(about[key] != size for key, size in now.items() if key in about)
        return f"{text}, saved by {_ranks(about)}" if differs else text


def division(plan: Plan) -> dict[str, int]:
    """Return the number of ranks and how they divide the model, for a checkpoint's manifest."""
    return {
        "world_size": plan.world.world_size,
        "zero_stage": plan.zero_stage,
        "pipeline_stages": plan.grid.pipeline,
        "tensor_ranks": plan.grid.tensor,
        "sequence_ranks": plan.grid.sequence,
        "expert_ranks": plan.grid.expert,
    }


def _ranks(about: Mapping[str, Any]) -> str:
    """Return the division in a manifest as text."""
    ranks, stage = about.get("world_size"), about.get("zero_stage")
    axes = ("pipeline_stages", "tensor_ranks", "sequence_ranks", "expert_ranks")
    sizes = [f"{about[key]} {key.replace('_', ' ')}" for key in axes if about.get(key, 1) != 1]
    within = f" with {', '.join(sizes)}" if sizes else ""
    return f"{ranks} rank{'s' * (ranks != 1)} under ZeRO {stage}{within}"


def find_resume_point(plan: Plan, record: dict[str, Any], in_full: bool = True) -> ResumePoint:
    """Return the checkpoint from which `plan` starts; `record` is its plan.json. `in_full`: as in
    `store.verified`. Collective.

    Raises ConfigError on all ranks if this plan may not resume from it, and NoCheckpoint if
    checkpoints exist but none is usable: a run with checkpoints never starts over silently.
    """
    own = plan.config.run.dir
    resume_point = None if own is None else _own(plan, RunFolder(own), record, in_full)
    if resume_point is not None:
        return resume_point
    if plan.config.resume.from_ is not None:
        return _branch(plan, plan.config.resume.from_, record, in_full)
    source = plan.config.model.init_from
    if source is not None and broadcast_object(has_checkpoints(source)):
        return ResumePoint(_checkpoint_of(source, "model.init_from", in_full), "weights")
    return ResumePoint()


def own_checkpoints(plan: Plan) -> list[Path]:
    """Return the checkpoints in run.dir, intact or not, as seen by rank 0. Collective."""
    own = plan.config.run.dir
    if own is None:
        return []
    store = Store(RunFolder(own).checkpoints_dir)
    return broadcast_object(store.all() if rank_and_ranks()[0] == 0 else [])


def choose_again(
    plan: Plan, record: dict[str, Any], chosen: ResumePoint, before: list[Path]
) -> ResumePoint:
    """Return the resume point, now that the folder is locked: `chosen` if the folder still contains
    the same checkpoints as `before`. Until then, the last process may have been saving. Collective.

    Raises as `find_resume_point`, and NoCheckpoint if all checkpoints were removed.
    """
    if own_checkpoints(plan) == before:
        return chosen
    again = find_resume_point(plan, record)
    if chosen.kind == "resumed" and again.kind != "resumed":  # the model has no weights yet
        raise NoCheckpoint(
            f"the checkpoints of {plan.config.run.dir} were removed while the run was starting"
        )
    return again


def _own(
    plan: Plan, folder: RunFolder, record: dict[str, Any], in_full: bool
) -> ResumePoint | None:
    """Return the newest usable checkpoint of the run in run.dir; None if it has none yet."""
    saved, damage = _read_plan(folder)
    checkpoint, unusable = newest_usable(folder.checkpoints_dir, in_full)
    if damage is not None and checkpoint is not None:  # the manifest has the essential settings
        model, data = checkpoint.manifest.model_config, checkpoint.manifest.data_fingerprint
        saved = {**record, "run": {}, "model_config": model, "data_fingerprint": data}
    allowed, run = plan.config.resume.allow, str(folder.path)
    problems = resume_problems(saved, record, allowed, run) if saved else []
    if checkpoint is not None:
        problems += too_short(record["total_steps"], checkpoint.state.step)
    if problems:
        raise ConfigError([f"{folder.path}: {problem}" for problem in problems])
    if checkpoint is None:
        if unusable:
            problems = [f"{run} has no usable checkpoint: {problem}" for problem in unusable]
            raise NoCheckpoint([*problems, f"{RESTORE}, or start again in another run.dir"])
        return None
    changes = changed_keys(saved, record) if saved else []
    damages = [damage] if damage else []
    steps_before = saved.get("total_steps") if saved else None
    return ResumePoint(checkpoint, "resumed", changes, unusable, damages, steps_before)


def _branch(plan: Plan, text: str, record: dict[str, Any], in_full: bool) -> ResumePoint:
    """Return a checkpoint of another run, to continue with other hyperparameters."""
    run, _ = run_and_step(text)
    own = plan.config.run.dir
    if own is not None and os.path.realpath(Path(own).expanduser()) == os.path.realpath(run):
        raise ConfigError(f"resume.from={text} is run.dir itself: give the branch its own run.dir")
    saved, damage = _read_plan(RunFolder(run))
    checkpoint = _checkpoint_of(text, "resume.from", in_full)
    before = saved or {
        "model_config": checkpoint.manifest.model_config,
        "data_fingerprint": checkpoint.manifest.data_fingerprint,
        "precision": checkpoint.manifest.precision,
        "run": {},
    }
    problems = branch_problems(before, record, plan.config.resume.allow, str(run))
    total_steps, step = record["total_steps"], checkpoint.state.step
    if total_steps is not None and step > total_steps:
        raise_it = "raise it, or name an earlier step, RUN@STEP"
        problems.append(f"its step {step} is beyond train.steps={total_steps}: {raise_it}")
    if problems:
        raise ConfigError([f"resume.from={text}: {problem}" for problem in problems])
    changes, damages = changed_keys(before, record), [damage] if damage else []
    return ResumePoint(checkpoint, "branched", changes, [], damages, before.get("total_steps"))


def _checkpoint_of(text: str, key: str, in_full: bool) -> Checkpoint:
    try:
        return checkpoint_of(text, in_full)
    except Unusable as error:
        raise NoCheckpoint(f"{key}={text}: {error}") from error


def _read_plan(folder: RunFolder) -> tuple[dict[str, Any] | None, str | None]:
    """Return (plan.json, None), or (None, the problem) if it is damaged, as read by rank 0: ranks
    may see different folder contents. Collective.
    """
    return broadcast_object(_plan_in(folder) if rank_and_ranks()[0] == 0 else (None, None))


def _plan_in(folder: RunFolder) -> tuple[dict[str, Any] | None, str | None]:
    try:
        plan = folder.read_plan()
    except Unreadable as error:
        return None, str(error)
    if plan is None or has_sections(plan):
        return plan, None
    return None, f"{folder.plan_path} is damaged: it is not the plan of a run"


def foreseen(plan: Plan) -> list[str]:
    """Return how the run would go on, for a dry run, which reads neither data nor tensors; nothing
    if it starts anew. Raises as `find_resume_point`.
    """
    own, source = plan.config.run.dir, plan.config.resume.from_
    folders = [Path(own)] if own is not None else []
    folders += [run_and_step(source)[0]] if source is not None else []
    saved = next(filter(None, (_plan_in(RunFolder(folder))[0] for folder in folders)), None) or {}
    model = saved.get("model_config")
    if isinstance(model, dict) and isinstance(rows := model.get("vocab_size"), int):
        plan = with_facts(plan, Facts(ids=rows))  # the run added rows for its tokenizer
    record = {**plan.to_json(), "total_steps": plan.steps}
    for key in open_keys(plan.config):
        del record["run"]["train"][key.removeprefix("train.")]
    point = find_resume_point(plan, record, in_full=False)
    ignored = [f"ignored: {problem}" for problem in (*point.problems, *point.damages)]
    how = ""
    with contextlib.suppress(Unreadable):
        if own is not None and (status := RunFolder(own).read_status()):
            how = f", {status.get('outcome')} at step {status['step']}"
    if point.checkpoint is None:
        again = f"{own} holds a run{how}: no checkpoint, so it starts again"
        return [again] if own and saved else []
    name, run = point.checkpoint.path.name, point.checkpoint.path.parents[1]
    text = f"starts with the weights of {name} of {run}"
    if point.kind == "resumed":
        text = f"{run} holds a run{how}: it is resumed from {name}"
    elif point.kind == "branched":
        text = f"branches off {name} of {run}"
        if "data_fingerprint" in asked([change["key"] for change in point.changes], record):
            text += "; if its documents are others, set resume.allow=data_fingerprint"
    return [*ignored, text]
