"""Finds and loads the checkpoint from which a run continues; keeps a sample of its data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.checkpoint.collectives import broadcast_object, first_problem
from harness.checkpoint.compatibility import (
    branch_problems,
    changed_keys,
    has_sections,
    resume_problems,
    too_short,
)
from harness.checkpoint.export import replacing, sweep
from harness.checkpoint.store import Checkpoint, Store, checkpoint_of, is_run, newest_usable
from harness.config.run_config import run_and_step
from harness.data.batches import Stream
from harness.data.order import reservoir
from harness.data.packing import Document
from harness.data.pair import write_documents
from harness.data.tokenizer import tokenizer_hash
from harness.engine.api import Engine
from harness.errors import ConfigError, NoCheckpoint, Unusable
from harness.files.kept_sample import FACTS, HELD_OUT, TRAIN, kept_facts
from harness.files.records import Unreadable
from harness.plan.plan import Plan
from harness.run.run import Run
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


def find_resume_point(plan: Plan, record: dict[str, Any]) -> ResumePoint:
    """Return the checkpoint from which `plan` starts; `record` is its plan.json. Collective.

    Raises ConfigError on all ranks if this plan may not resume from it, and NoCheckpoint if
    checkpoints exist but none is usable: a run with checkpoints never starts over silently.
    """
    own = plan.config.run.dir
    if own is not None and (resume_point := _own(plan, RunFolder(own), record)) is not None:
        return resume_point
    if plan.config.resume.from_ is not None:
        return _branch(plan, plan.config.resume.from_, record)
    source = plan.config.model.init_from
    if source is not None and broadcast_object(is_run(source)):
        if plan.config.model.lora.rank is not None:
            problem = "adapters need exported weights: set model.init_from"
            raise ConfigError(f"model.init_from={source} is a run, but {problem}={source}/export")
        return ResumePoint(_checkpoint_of(source, "model.init_from"), "weights")
    return ResumePoint()


def own_checkpoints(plan: Plan) -> list[Path]:
    """Return the checkpoints in run.dir, intact or not, as seen by rank 0. Collective."""
    own = plan.config.run.dir
    if own is None:
        return []
    store = Store(RunFolder(own).checkpoints_dir)
    return broadcast_object(store.all() if dist.get_rank() == 0 else [])


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


def _own(plan: Plan, folder: RunFolder, record: dict[str, Any]) -> ResumePoint | None:
    """Return the newest usable checkpoint of the run in run.dir; None if it has none yet."""
    saved, damage = _read_plan(folder)
    checkpoint, unusable = newest_usable(folder.checkpoints_dir)
    if damage is not None and checkpoint is not None:  # the manifest has the essential settings
        manifest = checkpoint.manifest
        data = {
            "model_config": manifest.model_config,
            "data_fingerprint": manifest.data_fingerprint,
        }
        saved = {**record, "run": {}, **data}
    problems = resume_problems(saved, record, plan.config.resume.allow) if saved else []
    if checkpoint is not None:
        problems += too_short(record["total_steps"], checkpoint.state.step)
    if problems:
        raise ConfigError([f"{folder.path}: {problem}" for problem in problems])
    if checkpoint is None:
        if unusable:
            raise NoCheckpoint([f"{folder.path} has no usable checkpoint: {p}" for p in unusable])
        return None
    changes = changed_keys(saved, record) if saved else []
    damages = [damage] if damage else []
    steps_before = saved.get("total_steps") if saved else None
    return ResumePoint(checkpoint, "resumed", changes, unusable, damages, steps_before)


def _branch(plan: Plan, text: str, record: dict[str, Any]) -> ResumePoint:
    """Return a checkpoint of another run, to continue with other hyperparameters."""
    run, _ = run_and_step(text)
    own = plan.config.run.dir
    if own is not None and os.path.realpath(Path(own).expanduser()) == os.path.realpath(run):
        raise ConfigError(f"resume.from={text} is run.dir itself: give the branch its own run.dir")
    saved, damage = _read_plan(RunFolder(run))
    checkpoint = _checkpoint_of(text, "resume.from")
    before = saved or {
        "model_config": checkpoint.manifest.model_config,
        "data_fingerprint": checkpoint.manifest.data_fingerprint,
        "precision": checkpoint.manifest.precision,
        "run": {},
    }
    problems = branch_problems(before, record, plan.config.resume.allow)
    if checkpoint.state.step > record["total_steps"]:
        problems.append(
            f"its step {checkpoint.state.step} is beyond train.steps={record['total_steps']}"
        )
    if problems:
        raise ConfigError([f"resume.from={text}: {problem}" for problem in problems])
    damages = [damage] if damage else []
    return ResumePoint(
        *(checkpoint, "branched", changed_keys(before, record)),
        damages=damages,
        steps_before=before.get("total_steps"),
    )


def _checkpoint_of(text: str, key: str) -> Checkpoint:
    try:
        return checkpoint_of(text)
    except Unusable as error:
        raise NoCheckpoint(f"{key}={text}: {error}") from error


def load_into(engine: Engine, checkpoint: Checkpoint, weights_only: bool = False) -> None:
    """Load a checkpoint's weights and, unless `weights_only`, the optimizer states. Collective.

    Raises NoCheckpoint on all ranks if the checkpoint lacks something that this model has. Any
    other exception (out of memory, a failed read) is raised on this rank only; starting again may
    help.
    """
    problem = None
    try:
        reader = checkpoint.reader()
        engine.restore(reader.fill, reader.optimizer_kinds if not weights_only else lambda _: ())
    except Unusable as error:
        problem = f"{error}: it was saved from another model"
    except FileNotFoundError as error:
        problem = f"{checkpoint.path} cannot be loaded: {type(error).__name__}: {error}"
    if (problem := first_problem(problem)) is not None:
        raise NoCheckpoint(problem)
    engine.refresh_weights()
    if not weights_only:
        engine.restore_scalars(checkpoint.manifest.engine)


def _read_plan(folder: RunFolder) -> tuple[dict[str, Any] | None, str | None]:
    """Return (plan.json, None), or (None, the problem) if it is damaged, as read by rank 0: ranks
    may see different folder contents. Collective.
    """
    return broadcast_object(_plan_in(folder) if dist.get_rank() == 0 else (None, None))


def _plan_in(folder: RunFolder) -> tuple[dict[str, Any] | None, str | None]:
    try:
        plan = folder.read_plan()
    except Unreadable as error:
        return None, str(error)
    if plan is None or has_sections(plan):
        return plan, None
    return None, f"{folder.plan_path} is damaged: it is not the plan of a run"


MOST_TOKENS = 1 << 23
"""Maximum number of tokens to keep of each split."""


def keep_sample(run: Run) -> None:
    """Write a sample of all data read so far, on rank 0; a failure is recorded as an event."""
    if not (run.plan.config.data.reservoir and run.state.samples):
        return
    run.pulse("save", run.state.step)  # on all ranks: hang reports compare beat counts
    if not run.is_writer:
        return
    folder = run.folder.reservoir_dir
    try:
        _write(run, folder)
    except (OSError, ConfigError) as error:
        message = f"no sample of the data was saved in {folder}: {error}"
        run.event("sample_not_kept", step=run.state.step, message=message)
        run.progress.say(message)
    run.meter.restart()


def _write(run: Run, folder: Path) -> None:
    """Write the folder anew. Raises ConfigError if it holds a sample of other data."""
    sweep(folder, alone=True)  # leftovers of a killed process
    config, data, seen = run.plan.config, run.data, run.state.samples
    key = f"{config.train.seed}:{data.fingerprint}"
    if folder.exists() and kept_facts(folder).get("of") != key:  # maybe the only one of that data
        raise ConfigError("it holds a sample of other data: move it so that a new one can be saved")
    if data.mixture() is None:  # after an epoch the documents repeat
        seen = min(seen, data.train.samples)
    max_samples = max(1, MOST_TOKENS // (run.plan.seq_len + 1))
    kept = reservoir(min(config.data.reservoir, max_samples), seen, key).tolist()
    held_out = range(min(config.eval.samples, max_samples, data.held_out.samples))
    facts: dict[str, Any] = {"of": key, "tokenizer": tokenizer_hash(data.tokenizer)}
    # A .bin/.idx pair may hold ids that the model has but the tokenizer lacks.
    num_ids = max(data.vocab_size, run.plan.model_config.get("vocab_size") or 0)
    sides = ((TRAIN, data.train, kept), (HELD_OUT, data.held_out, held_out))
    with replacing(folder, is_export=False) as unfinished:
        for side, stream, samples in sides:
            facts[f"{side}_tokens"] = _write_side(unfinished / side, stream, samples, num_ids)
        (unfinished / FACTS).write_text(json.dumps(facts))


def _write_side(
    prefix: Path, stream: Stream, samples: Iterable[int], vocab_size: int
) -> int | None:
    """Write samples as a .bin/.idx pair. Return their number of tokens; None if it differs."""
    sizes = set[int]()

    def documents() -> Iterator[Document]:
        for index in samples:
            of_sample = stream.documents_of(index)
            sizes.add(sum(len(ids) for ids, _ in of_sample))
            yield from of_sample

    write_documents(prefix, vocab_size, documents())
    return sizes.pop() if len(sizes) == 1 else None
