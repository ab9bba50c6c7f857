"""A run, built from a Plan: everything that the loop needs, on this rank."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from harness.checkpoint.export import export_problem, replacing, sweep
from harness.checkpoint.manifest import TrainState
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.config.curriculum import Step
from harness.config.lr_and_batch import Schedule
from harness.data.batches import Batch
from harness.data.build import Data, DataSpec, build_data
from harness.data.kept_tokenizer import save_generation, save_tokenizer
from harness.engine.processes import alarm, join
from harness.errors import CannotSave, ConfigError, ExitCode
from harness.estimate.fit import shortages_here
from harness.estimate.host import checkpoint_bytes
from harness.guard.alarm import Failure
from harness.guard.pulse import Limits, Pulse
from harness.guard.signals import StopGuard
from harness.guard.stop_request import StopAsked, StopRequest
from harness.guard.time_left import TimeLeft, slurm_seconds_left
from harness.guard.watchdog import Watchdog
from harness.plan.plan import Plan
from harness.plan.swap_space import swap_problems
from harness.plan.text import row, summary
from harness.run.live_memory import MemoryCheck
from harness.run.metrics import Meter, Progress, clock
from harness.run.open_folder import open_folder
from harness.run.probe import check_probe
from harness.run.record import plan_record
from harness.run.resumption import Beginning, find_beginning, load_into
from harness.runfolder import Outcome, RunFolder


@dataclass
class Run:
    """All parts of a run on this rank. Only rank 0's folder is open for writing."""

    plan: Plan
    data: Data
    engine: Any
    folder: RunFolder
    saver: Saver
    schedule: Schedule
    total_steps: int
    guard: StopGuard
    pulse: Pulse
    watchdog: Watchdog
    time_left: TimeLeft
    meter: Meter
    memory: MemoryCheck
    progress: Progress
    state: TrainState
    known: dict[str, Any] = field(default_factory=dict)
    """What the watch over the run knew when the state was saved."""
    held_out_nats: float | None = None
    """The last evaluation's loss; None before the first of this process."""

    def stream(self) -> Generator[list[Batch]]:
        """This rank's micro-batches of every step from here on; close() it."""
        return self.data.train.steps(
            self.state.samples,
            curriculum=self.plan.curriculum,
            micro_batch=self.plan.micro_batch,
            data_rank=self.plan.grid.coords(self.plan.world.rank).data,
            data_ranks=self.plan.grid.data,
            prefetch=self.plan.run.data.prefetch,
            pin_memory=self.plan.world.accelerator == "cuda",
        )

    @property
    def next_step(self) -> Step:
        """What the next optimizer step reads."""
        return self.plan.curriculum.at(self.state.samples)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.plan.world.rank == 0

    def event(self, kind: str, **fields: Any) -> None:
        """Record something that should not pass unnoticed."""
        if self.is_writer:
            self.folder.append_event(kind, **fields)

    def stop_asked(self) -> tuple[bool, bool]:
        """What `guard.agree` says, once this rank has looked at the clock: rank 0's alone counts.

        Collective; every rank gets the same answer.
        """
        longest = self.pulse.longest_s
        if self.is_writer and self.time_left.is_last_step(longest("step"), longest("save")):
            self.guard.request.ask("the time limit")
        return self.guard.agree(self.saver.written)

    def hangs(self, report: dict[str, Any] | None) -> None:
        """Final report, written from the watchdog's thread: this process ends next."""
        rank, step, message = self.plan.world.rank, self.state.step, "the ranks hang"
        if report is not None:
            message = report["message"]
            self.folder.append_failure(rank, "hang", step=step, message=message)
        if report is not None or self.is_writer:  # rank 0 may be the one that hangs
            self.folder.write_failure(ExitCode.HANG, step, message)

    def fails(self, failure: Failure) -> None:
        """Record what ends all ranks, on the rank that failed; and on rank 0, which sees the folder
        also where that one does not. This process ends next.
        """
        step = self.state.step
        if failure.rank == self.plan.world.rank:
            self.folder.append_failure(failure.rank, step=step, message=failure.message)
        if failure.rank == self.plan.world.rank or self.is_writer:
            self.folder.write_failure(failure.code, step, failure.message)
        self.folder.close()

    def ended(self, outcome: Outcome, code: int, message: str | None = None) -> None:
        """Record how the run ended, with all ranks, and let go of its folder."""
        if self.is_writer:
            try:
                self.folder.write_status(outcome, code, self.state.step, message)
            except CannotSave as error:  # must not hide what ended the run
                self.progress.say(str(error))
            self.folder.close()


def _give_up(rank: int) -> None:
    """End all ranks: this one was asked twice to stop while it started."""
    failure = Failure(rank, ExitCode.STOPPED, "asked twice to stop")
    alarm().end(failure, lambda first: print(first, file=sys.stderr, flush=True))


def build(
    plan: Plan,
    trust_remote_code: bool = False,
    data: Data | None = None,
    request: StopRequest | None = None,
) -> Run:
    """Make everything that the loop needs; resumes the run that `run.dir` already holds.

    What is wrong with data, model or folder raises ConfigError on every rank, before the run
    folder is written. `data` takes the place of what the plan names. `request`: signals are noted
    there already; where one comes, all ranks raise RunStopped as soon as they meet.
    """
    request = request or StopRequest()
    progress = Progress(enabled=plan.world.rank == 0)
    progress.say(summary(plan))
    time_left = _time_left(plan)
    if lacking := [*swap_problems(plan), *_foreign_export(plan)]:
        raise ConfigError(lacking)
    forced = _check_fit(plan)
    spec = DataSpec.of_run(plan.run, plan.model_config, trust_remote_code=trust_remote_code)
    with contextlib.suppress(StopAsked), request.breaks_off():
        data = data or build_data(spec, progress.say)
    with request.joins():
        device = join(plan.world, plan.run.guard.hang_first_s)
    request.give_up = functools.partial(_give_up, plan.world.rank)
    guard = StopGuard(plan.world.world_size, request)
    guard.stop_if_asked()
    assert data is not None, "nothing but a request to stop breaks it off"
    progress.say(row("data", data.summary()))
    _require_targets(plan, data)
    total_steps = _total_steps(plan, data)
    record = plan_record(plan, data, total_steps)
    pulse, watchdog = _watched(plan)
    with contextlib.ExitStack() as unless_built:
        unless_built.callback(watchdog.close)
        beginning = find_beginning(plan, record)
        from harness.engine.build import build_engine  # imports DeepSpeed, which looks for devices

        blank = beginning.checkpoint is not None
        engine = build_engine(plan, device, trust_remote_code, data.train.document_mask, blank)
        memory = MemoryCheck(plan, device)
        guard.stop_if_asked()  # a large model takes minutes; the folder is as it was
        folder = open_folder(plan, progress.say)
        progress.total_steps = total_steps
        run = Run(
            plan=plan,
            data=data,
            engine=engine,
            folder=folder,
            saver=_saver(plan, folder),
            schedule=plan.schedule(total_steps),
            total_steps=total_steps,
            guard=guard,
            pulse=pulse,
            watchdog=watchdog,
            time_left=time_left,
            meter=Meter(plan),
            memory=memory,
            progress=progress,
            state=TrainState(),
        )
        watchdog.folder, watchdog.on_hang = folder.heartbeats_dir, run.hangs
        alarm().on_end = run.fails
        events = [*plan.events, *data.events(), *forced, *engine.events]
        _begin(run, record, events, beginning)
        unless_built.pop_all()
    return run


def _require_targets(plan: Plan, data: Data) -> None:
    """Raises ConfigError where an evaluation would be the mean of nothing."""
    samples = min(plan.run.eval.samples, data.held_out.samples)
    if not data.held_out.targets_in(0, samples):
        raise ConfigError(
            f"the {samples} held-out samples hold no target, only prompts: raise eval.samples (now "
            f"{plan.run.eval.samples}), data.held_out or data.seq_len"
        )


def _total_steps(plan: Plan, data: Data) -> int:
    if plan.steps is not None:
        return plan.steps
    assert plan.run.train.epochs is not None
    samples = math.ceil(plan.run.train.epochs * data.train.samples)
    steps = plan.curriculum.steps_for(samples)
    if problems := plan.run.profile.problems(steps):
        raise ConfigError(problems)
    return steps


def _watched(plan: Plan) -> tuple[Pulse, Watchdog]:
    """What this rank's progress is told to, and who ends it where there is none."""
    guard = plan.run.guard
    pulse = Pulse(Limits(guard.hang_floor_s, guard.hang_factor, guard.hang_first_s))
    watchdog = Watchdog(pulse, plan.world.rank, plan.world.world_size)
    if guard.hang_floor_s:
        watchdog.start()
    return pulse, watchdog


def _time_left(plan: Plan) -> TimeLeft:
    """Asked for once, on the rank whose clock counts."""
    limit_s = plan.run.guard.time_limit_s
    if limit_s is None and plan.world.rank == 0:
        limit_s = slurm_seconds_left()
    saved = checkpoint_bytes(plan.estimate.inputs) if plan.estimate else 0
    return TimeLeft(limit_s, saved / plan.world.world_size)


def _begin(
    run: Run,
    record: dict[str, Any],
    events: list[dict[str, Any]],
    beginning: Beginning,
) -> None:
    """Write down what will run, and go on where the checkpoint ends."""
    if run.is_writer:
        run.folder.write_plan(record)
    for event in events:
        run.event(**event)
    run.progress.say(f"run folder {run.folder.path}")
    if (left_s := run.time_left.seconds) is not None:
        run.event("time_limit", seconds_left=left_s)
        run.progress.say(f"time limit in {clock(left_s)}: saved and ended before")
    for damage in beginning.damages:
        run.event("damaged_record", message=damage)
        run.progress.say(f"not needed, not used: {damage}")
    for problem in beginning.problems:
        run.event("unusable_checkpoint", message=problem)
        run.progress.say(f"not used: {problem}")
    if run.is_writer and not run.folder.tokenizer_dir.exists():  # so that exports need no data
        parent = beginning.checkpoint and RunFolder(beginning.checkpoint.path.parents[1])
        sweep(run.folder.tokenizer_dir)  # after a kill while it was written
        with replacing(run.folder.tokenizer_dir) as unfinished:
            save_tokenizer(run.data.tokenizer, unfinished)
            save_generation(run.engine.module, unfinished, parent and parent.tokenizer_dir)
    checkpoint, kind = beginning.checkpoint, beginning.kind
    if checkpoint is None:
        if run.folder.attempt > 1:
            run.event("began_again", message="no checkpoint was saved before")
            run.progress.say("no checkpoint was saved yet: begins at step 0 again")
        return
    load_into(run.engine, checkpoint, weights_only=kind == "weights")
    check_probe(run.engine, checkpoint, run.plan)
    if kind != "weights":
        run.state, run.known = checkpoint.state, dict(checkpoint.manifest.watch)
        if kind == "branched":  # to try something else, with as much patience
            run.known.pop("patience", None)
        run.held_out_nats = checkpoint.manifest.held_out_loss
    run.event(
        kind,
        step=run.state.step,
        path=str(checkpoint.path),
        manifest=checkpoint.manifest.checksum,
        changes=beginning.changes,
    )
    run.progress.say(f"{kind} {checkpoint.path.name} of {run.total_steps} steps")


def _foreign_export(plan: Plan) -> list[str]:
    """What keeps the export from being made, found before the run and not after it."""
    run_dir = plan.run.run.dir
    if not plan.run.save.export or run_dir is None:
        return []
    problem = export_problem(RunFolder(run_dir).export_dir)
    return [f"save.export: {problem}, or set save.export=false"] if problem else []


def _check_fit(plan: Plan) -> list[dict[str, Any]]:
    """Refuse what this machine cannot hold; under plan.force it is an event instead."""
    if plan.estimate is None:
        return []
    problems = shortages_here(plan.estimate, plan.world.local_rank, plan.run.run.dir)
    if problems and not plan.run.plan.force:
        raise ConfigError(problems)
    return [{"kind": "forced", "message": problem} for problem in problems]


def _saver(plan: Plan, folder: RunFolder) -> Saver:
    wish = plan.run.save
    keep = Retention(wish.keep, wish.keep_every, wish.keep_best)
    # The lines of the steps that a checkpoint holds are never written again.
    return Saver(Store(folder.checkpoints_dir), plan.world.rank, keep, folder.sync)
