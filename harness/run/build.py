"""Builds a run from a plan."""

import contextlib
import functools
import math
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from harness.checkpoint.export import replacing, sweep
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store
from harness.config.own import source
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.data.tokenizer_files import save_companions, save_generation, save_tokenizer
from harness.engine.launches import measure_host
from harness.engine.meta_model import empty_model
from harness.engine.processes import alarm, join
from harness.errors import ConfigError, ExitCode
from harness.estimate.fit import shortages_here
from harness.estimate.host import checkpoint_bytes
from harness.guard.failure_broadcast import Failure
from harness.guard.signals import StopGuard
from harness.guard.stability import StabilityMonitor
from harness.guard.stop_request import StopAsked, StopRequest
from harness.guard.time_left import TimeLeft, slurm_seconds_left
from harness.guard.watchdog import Pulse, Watchdog
from harness.models.loss import own_loss
from harness.plan.batches import SMALLEST
from harness.plan.duration import length
from harness.plan.machine import remove_left_swap, short_of_disk, swap_problems
from harness.plan.make import takes, with_facts
from harness.plan.plan import Facts, Plan
from harness.plan.text import row, summary
from harness.plan.weights import has_checkpoints
from harness.run.attention import AttentionMetrics
from harness.run.data_decisions import decide_from_data, require_same_settings
from harness.run.ending import fails, hangs
from harness.run.finish import question_of, show_sample
from harness.run.instrument import own_metrics
from harness.run.live_memory import MemoryCheck
from harness.run.meter import ExpertLoad, Meter, SourceLosses, StepClock, WeightChange
from harness.run.notify import Notifier
from harness.run.pages import Pages
from harness.run.plan_record import open_folder, plan_record
from harness.run.preferences import PreferenceMetrics, reference_of, take_reference
from harness.run.profiling import Profiler
from harness.run.progress import Progress
from harness.run.resumption import ResumePoint, choose_again, find_resume_point, own_checkpoints
from harness.run.run import Run
from harness.run.saving import check_probe, load_into
from harness.run.step import end_with_the_data
from harness.run.trackers import Trackers
from harness.run.verify import Verification
from harness.runfolder import RunFolder, saved_steps
from harness.steps import Steps


def start_run(
    run: Run, record: dict[str, Any], events: list[dict[str, Any]], resume_point: ResumePoint
) -> None:
    """Record the run and load its checkpoint, if any. Collective."""
    if run.is_writer:
        run.folder.write_plan(record)
        if run.plan.code is not None:
            run.folder.write_code(source())
    for event in events:
        run.event(**event)
    if (left_s := run.time_left.seconds) is not None:
        run.event("time_limit", seconds_left=left_s)
        run.progress.say(f"time limit in {length(left_s)}: the run saves and stops before")
    for damage in resume_point.damages:
        run.event("damaged_record", message=damage)
        run.progress.say(f"ignored, not needed: {damage}")
    for problem in resume_point.problems:
        run.event("unusable_checkpoint", message=problem)
        run.progress.say(f"ignored: {problem}")
    if run.is_writer and not run.folder.tokenizer_dir.exists():  # exports then need no data
        parent = None
        if resume_point.checkpoint is not None:
            parent = RunFolder(resume_point.checkpoint.path.parents[1]).tokenizer_dir
        sweep(run.folder.tokenizer_dir, alone=True)  # leftovers of a killed process
        with replacing(run.folder.tokenizer_dir) as unfinished:
            weights = run.plan.config.model.init_from
            save_tokenizer(run.data.tokenizer, unfinished, weights)
            save_generation(run.engine.module, unfinished, parent)
            save_companions(weights, unfinished, parent)
    _load(run, resume_point)
    if run.is_writer:
        run.trackers.open(run.plan.config.log, run.folder, record, run.state.step)


def _load(run: Run, resume_point: ResumePoint) -> None:
    """Load the checkpoint from which the run starts, if there is one. Collective."""
    checkpoint, kind = resume_point.checkpoint, resume_point.kind
    if checkpoint is None:
        if run.plan.config.model.init_from is not None and question_of(run):
            show_sample(run, "sample before training")
        if run.folder.attempt > 1:
            run.event("began_again", message="no checkpoint was saved")
            run.progress.say("no checkpoint was saved: starts at step 0 again")
        return
    load_into(run.engine, checkpoint, weights_only=kind == "weights")
    check_probe(run.engine, checkpoint, run.plan)
    if kind != "weights":
        run.steps.move(checkpoint.state)
        watch = dict(checkpoint.manifest.watch)
        if kind == "branched":  # a branch starts with full patience
            watch.pop("patience", None)
        run.stability.restore(watch)
        run.held_out_nats = checkpoint.manifest.held_out_loss
    run.event(
        kind,
        step=run.state.step,
        path=str(checkpoint.path),
        manifest=checkpoint.manifest.checksum,
        changes=resume_point.changes,
    )
    step, source = checkpoint.state.step, checkpoint.path.parents[1]
    if kind == "weights":
        run.progress.say(f"starts with the weights of step {step:,} of {source}")
    else:
        run.progress.say(resume_point.text(run.plan, run.steps.total))
        end_with_the_data(run)  # a rollback may have skipped samples


def _give_up(rank: int) -> None:
    """End all ranks, because this one was asked to stop twice during start-up."""
    failure = Failure(rank, ExitCode.STOPPED, "asked twice to stop", alarm().place)
    alarm().end(failure, lambda first: print(first, file=sys.stderr, flush=True))


def build(
    plan: Plan,
    trust_remote_code: bool = False,
    data: Data | None = None,
    request: StopRequest | None = None,
) -> Run:
    """Build everything that the loop needs; resume the run in `run.dir`, if any. Collective.

    Raises ConfigError on every rank for problems with data, model or folder, before the run folder
    is written. `data` replaces the plan's. `request` already receives signals; after one, all ranks
    raise RunStopped as soon as they have joined.
    """
    request = request or StopRequest()
    progress = Progress(enabled=plan.world.rank == 0)
    progress.say(summary(plan))
    time_left = _time_left(plan, request)
    remove_left_swap(plan)
    if problems := swap_problems(plan):
        raise ConfigError(problems)
    _check_fit(plan)
    own = [*own_metrics(plan.config.own.given)]
    own_loss(plan)  # a trial, before the data is read
    if data is None:  # tokenizing takes longer
        empty_model(plan, trust_remote_code)
    data, device, guard = _joined(plan, trust_remote_code, data, request, progress)
    require_same_settings(plan)
    plan, total_steps, from_data = decide_from_data(plan, data, device, progress)
    require_same_settings(plan)  # what the data decides
    forced = _check_fit(plan)
    record = plan_record(plan, data, total_steps)
    pulse, watchdog = _start_watchdog(plan)
    with contextlib.ExitStack() as unless_built:
        unless_built.callback(watchdog.close)
        checkpoints = own_checkpoints(plan)
        resume_point = find_resume_point(plan, record)
        from harness.engine.build import build_engine  # imports DeepSpeed, which probes for devices

        # With adapters, the frozen weights are read from model.init_from, not from a checkpoint.
        blank = resume_point.checkpoint is not None and plan.config.model.lora.rank is None
        reference = reference_of(plan, data, total_steps)
        if reference is not None and not guard.told_by_rank_0(reference.is_kept):
            # It is computed with the initial weights. Those of a run are loaded.
            blank = has_checkpoints(plan.config.model.init_from or "")
        masked, padded = data.document_mask, data.train.holds_whole_documents
        if said := measure_host(plan.world):
            progress.say(row("host", said))
        engine = build_engine(plan, device, trust_remote_code, masked, blank, padded)
        memory = MemoryCheck(plan, device)
        guard.stop_if_asked()  # a large model takes minutes; the folder is still untouched
        folder = open_folder(plan, progress.say)
        folder.count_gpu_hours(-(-plan.world.world_size // plan.world.ranks_per_gpu), request.began)
        target = plan.config.run.notify if plan.world.rank == 0 else None
        notifier = Notifier(target, record["owner"], folder, progress.say)
        progress.total_steps = total_steps
        saves = plan.config.save
        keep = Retention(saves.keep, saves.keep_every, saves.keep_best)
        run = Run(
            plan=plan,
            data=data,
            engine=engine,
            folder=folder,
            # A resumed run does not rewrite lines of earlier steps: sync before the checkpoint.
            saver=Saver(Store(folder.checkpoints_dir), plan.world.rank, keep, folder.sync),
            steps=Steps(plan, data.train, total_steps),
            stability=StabilityMonitor(plan.config.guard, plan.config.eval),
            guard=guard,
            pulse=pulse,
            watchdog=watchdog,
            time_left=time_left,
            meter=Meter(plan),
            progress=progress,
            pages=Pages(folder, plan.config.log.report and plan.world.rank == 0),
            trackers=Trackers(folder.append_event),
            notifier=notifier,
            instruments=(  # in the order in which all ranks call them
                Verification(plan),
                ExpertLoad(engine),
                SourceLosses(data.names, engine),
                PreferenceMetrics(),
                WeightChange(engine),
                AttentionMetrics(),
                StepClock(plan, record["seen_tokens"]),
                *own,
                memory,
                notifier,
            ),
        )
        report_path = folder.hang_path(folder.attempt)
        watchdog.write_to(folder.heartbeats_dir, report_path, functools.partial(hangs, run))
        alarm().on_end, alarm().gone = functools.partial(fails, run), watchdog.gone
        resume_point = choose_again(plan, record, resume_point, checkpoints)
        events = [*plan.events, *forced, *from_data, *engine.events]
        for event in engine.events:
            if event["kind"] == "unused_weights":  # of a family whose tensors the plan cannot count
                progress.say(row("note", event["message"]))
        take_reference(run, reference)
        start_run(run, record, events, resume_point)
        window = plan.config.profile.window
        if window is not None and window[1] > run.state.step:
            run.instruments += (Profiler(plan, engine, folder.profile_dir, progress.say),)
        unless_built.pop_all()
    return run


def _joined(
    plan: Plan, trust_remote_code: bool, data: Data | None, request: StopRequest, progress: Progress
) -> tuple[Data, torch.device, StopGuard]:
    """Read the data, then join the other ranks. Raises RunStopped if any was asked to stop."""
    spec = DataSpec.of_run(plan.config, plan.model_config, trust_remote_code=trust_remote_code)
    spec = replace(spec, pad_to=math.lcm(spec.pad_to, plan.ranks_per_row))
    with contextlib.suppress(StopAsked), request.breaks_off():
        data = data or build_data(spec, progress.say)
    with request.joins():
        device = join(plan.world, plan.config.guard.hang_first_s)
    alarm().place = plan.grid.described(plan.world.rank)
    request.give_up = functools.partial(_give_up, plan.world.rank)
    guard = StopGuard(plan.world.world_size, request)
    guard.stop_if_asked()
    assert data is not None, "nothing but a request to stop breaks it off"
    return data, device, guard


def _start_watchdog(plan: Plan) -> tuple[Pulse, Watchdog]:
    """Return this rank's pulse, and the watchdog that ends the rank if the pulse stops."""
    guard = plan.config.guard
    floor_s = guard.hang_floor_s * plan.world.ranks_per_gpu  # ranks of a shared GPU take turns
    pulse = Pulse(floor_s=floor_s, factor=guard.hang_factor, first_s=guard.hang_first_s)
    watchdog = Watchdog(pulse, plan.world.rank, plan.world.world_size, plan.grid.described)
    if guard.hang_floor_s:
        watchdog.start()
    return pulse, watchdog


def _time_left(plan: Plan, request: StopRequest) -> TimeLeft:
    """Return the remaining time, which only rank 0 reads from Slurm and checks."""
    limit_s = plan.config.guard.time_limit_s
    if limit_s is not None:
        limit_s -= time.monotonic() - request.began
    elif plan.world.rank == 0:
        limit_s = slurm_seconds_left()
    saved = checkpoint_bytes(plan.estimate.inputs) if plan.estimate else 0
    return TimeLeft(limit_s, saved / plan.world.world_size)


def _check_fit(plan: Plan) -> list[dict[str, Any]]:
    """Raise ConfigError if this machine's memory is too small even for the smallest batch that the
    data may allow; with plan.force, return events instead.
    """
    problems = shortages_here(plan.estimate, plan.world, takes(plan))
    if problems and plan.facts.counts is None:
        smallest = with_facts(plan, Facts(SMALLEST))
        problems = shortages_here(smallest.estimate, plan.world, takes(smallest))
    disk, is_hopeless = short_of_disk(plan, saved_steps(plan.config.run.dir))
    if is_hopeless:
        problems.append(f"{disk}; plan.force=true runs anyway")
    if problems and not plan.config.plan.force:
        raise ConfigError(problems)
    events = [{"kind": "forced", "message": problem} for problem in problems]
    return events + [{"kind": "disk", "message": disk}] * bool(disk and not is_hopeless)
