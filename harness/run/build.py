"""Builds a run from a Plan: everything that the loop needs, on this rank."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from typing import Any

from harness.checkpoint.export import export_problem
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.data.build import Data, DataSpec, build_data
from harness.engine.processes import alarm, join
from harness.errors import ConfigError, ExitCode
from harness.estimate.fit import shortages_here
from harness.estimate.host import checkpoint_bytes
from harness.guard.alarm import Failure
from harness.guard.judge import Judge
from harness.guard.pulse import Limits, Pulse
from harness.guard.signals import StopGuard
from harness.guard.stop_request import StopAsked, StopRequest
from harness.guard.time_left import TimeLeft, slurm_seconds_left
from harness.guard.watchdog import Watchdog
from harness.plan.plan import Plan
from harness.plan.swap_space import swap_problems
from harness.plan.text import row, summary
from harness.run.begin import begin
from harness.run.live_memory import MemoryCheck
from harness.run.meter import Meter, Progress
from harness.run.open_folder import open_folder
from harness.run.record import plan_record
from harness.run.resumption import find_beginning
from harness.run.run import Profiler, Run
from harness.runfolder import RunFolder
from harness.steps import Steps


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
    """Make everything that the loop needs; resume the run that `run.dir` already holds. Collective.

    Raises ConfigError on every rank for problems with data, model or folder, before the run folder
    is written. `data` replaces the data that the plan names. `request` already receives signals;
    after one, all ranks raise RunStopped as soon as they meet.
    """
    request = request or StopRequest()
    progress = Progress(enabled=plan.world.rank == 0)
    progress.say(summary(plan))
    time_left = _time_left(plan)
    if problems := [*swap_problems(plan), *_foreign_export(plan)]:
        raise ConfigError(problems)
    forced = _check_fit(plan)
    spec = DataSpec.of_run(plan.config, plan.model_config, trust_remote_code=trust_remote_code)
    with contextlib.suppress(StopAsked), request.breaks_off():
        data = data or build_data(spec, progress.say)
    with request.joins():
        device = join(plan.world, plan.config.guard.hang_first_s)
    request.give_up = functools.partial(_give_up, plan.world.rank)
    guard = StopGuard(plan.world.world_size, request)
    guard.stop_if_asked()
    assert data is not None, "nothing but a request to stop breaks it off"
    progress.say(row("data", data.summary()))
    _require_targets(plan, data)
    total_steps = _total_steps(plan, data)
    record = plan_record(plan, data, total_steps)
    pulse, watchdog = _start_watchdog(plan)
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
            steps=Steps(plan, data.train, total_steps),
            judge=Judge(plan.config.guard, plan.config.eval),
            guard=guard,
            pulse=pulse,
            watchdog=watchdog,
            time_left=time_left,
            meter=Meter(plan),
            memory=memory,
            progress=progress,
        )
        watchdog.folder, watchdog.on_hang = folder.heartbeats_dir, run.hangs
        alarm().on_end = run.fails
        events = [*plan.events, *data.events(), *forced, *engine.events]
        begin(run, record, events, beginning)
        run.profiler = _profiler(run)
        unless_built.pop_all()
    return run


def _require_targets(plan: Plan, data: Data) -> None:
    """Raise ConfigError if the held-out samples have no target: their mean would be undefined."""
    samples = min(plan.config.eval.samples, data.held_out.samples)
    if not data.held_out.targets_in(0, samples):
        raise ConfigError(
            f"the {samples} held-out samples hold no target, only prompts: raise eval.samples (now "
            f"{plan.config.eval.samples}), data.held_out or data.seq_len"
        )


def _total_steps(plan: Plan, data: Data) -> int:
    if plan.steps is not None:
        return plan.steps
    assert plan.config.train.epochs is not None
    samples = math.ceil(plan.config.train.epochs * data.train.samples)
    steps = plan.curriculum.steps_for(samples)
    if problems := plan.config.profile.problems(steps):
        raise ConfigError(problems)
    return steps


def _start_watchdog(plan: Plan) -> tuple[Pulse, Watchdog]:
    """Return this rank's pulse, and the watchdog that ends the rank if the pulse stops."""
    guard = plan.config.guard
    pulse = Pulse(Limits(guard.hang_floor_s, guard.hang_factor, guard.hang_first_s))
    watchdog = Watchdog(pulse, plan.world.rank, plan.world.world_size)
    if guard.hang_floor_s:
        watchdog.start()
    return pulse, watchdog


def _time_left(plan: Plan) -> TimeLeft:
    """Return the time limit, read from Slurm once, on rank 0: its clock counts."""
    limit_s = plan.config.guard.time_limit_s
    if limit_s is None and plan.world.rank == 0:
        limit_s = slurm_seconds_left()
    saved = checkpoint_bytes(plan.estimate.inputs) if plan.estimate else 0
    return TimeLeft(limit_s, saved / plan.world.world_size)


def _foreign_export(plan: Plan) -> list[str]:
    """Return the problems that would keep the run from being exported at its end."""
    run_dir = plan.config.run.dir
    if not plan.config.save.export or run_dir is None:
        return []
    problem = export_problem(RunFolder(run_dir).export_dir)
    return [f"save.export: {problem}, or set save.export=false"] if problem else []


def _check_fit(plan: Plan) -> list[dict[str, Any]]:
    """Raise ConfigError if this machine's memory is too small; under plan.force return events."""
    if plan.estimate is None:
        return []
    problems = shortages_here(plan.estimate, plan.world.local_rank, plan.config.run.dir)
    if problems and not plan.config.plan.force:
        raise ConfigError(problems)
    return [{"kind": "forced", "message": problem} for problem in problems]


def _profiler(run: Run) -> Profiler | None:
    """Return the profiler; None if this process takes no step of profile.steps."""
    window = run.plan.config.profile.window
    if window is None or window[1] <= run.state.step:
        return None
    from harness.run.profiling import Profiler  # loads torch's profiler

    return Profiler(run.plan, run.engine, run.folder.profile_dir, run.progress.say)


def _saver(plan: Plan, folder: RunFolder) -> Saver:
    config = plan.config.save
    keep = Retention(config.keep, config.keep_every, config.keep_best)
    # Lines of steps before a checkpoint are never written again: they must be on disk with it.
    return Saver(Store(folder.checkpoints_dir), plan.world.rank, keep, folder.sync)
