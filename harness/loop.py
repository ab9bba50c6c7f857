"""A run, trained to its end or to a stop. Every tool drives this loop, not a copy of it."""

from __future__ import annotations

import hashlib
from contextlib import closing, nullcontext
from typing import Any

import torch

from harness.checkpoint.load import Checkpoint, newest_usable, verified
from harness.checkpoint.store import Store
from harness.data.kept_tokenizer import brings_code
from harness.engine.processes import leave
from harness.errors import CannotSave, ExitCode, RunStopped, is_full_disk
from harness.layout.shape import num_parameters
from harness.plan.plan import Plan
from harness.run.exporting import Wish, export
from harness.run.live_memory import is_out_of_memory
from harness.run.metrics import monitor_events
from harness.run.noting import explain_out_of_memory, note_memory, note_what_runs
from harness.run.sampling import sample_text
from harness.run.saving import finish_save, save
from harness.run.start import Run, build
from harness.run.verify import check_norm, unsplit_start
from harness.run.watch import RollBack, Watch
from harness.runfolder import Outcome

__all__ = ["Run", "build", "evaluate", "train"]

_OUTCOMES: dict[ExitCode, Outcome] = {
    ExitCode.STOPPED: "stopped",
    ExitCode.DIVERGED: "diverged",
    ExitCode.CANNOT_SAVE: "failed",
}
CHECKED_PARAMETERS = 2 * 10**9  # up to here, a forward pass on the host takes minutes
EVALUATED_AT_ONCE = 8  # micro-batches between two looks at whether to stop
SMALL_CORPUS_TOKENS = 50_000_000  # up to here, counting tokens for the baselines takes seconds


def train(run: Run) -> ExitCode:
    """Train to the last step, or to a stop, which all ranks do together: they then leave the
    process group, and the run folder says how the run ended.

    What this raises is this rank's alone, and for `ending_together` to tell the others.
    """
    outcome: Outcome = "done"
    code, message = ExitCode.DONE, None
    try:
        if run.state.step == run.total_steps and run.folder.export_dir.exists():
            run.progress.say("nothing is left to do")
        else:
            _train(run)
            _finish(run)
    except RunStopped as stop:
        outcome, code, message = _OUTCOMES[stop.code], stop.code, stop.message
        try:
            run.event(outcome, step=run.state.step, message=message)
        except CannotSave as error:  # must not hide what ends the run, on all ranks
            run.progress.say(str(error))
        again = ""
        if outcome == "stopped":
            again = f"; the same command with run.dir={run.folder.path} resumes it"
        run.progress.say(f"{outcome} at step {run.state.step}: {message}{again}")
    except BaseException as error:
        if run.watchdog.hung:  # another rank ended first, and its connections with it
            run.watchdog.join()  # which ends this process
        if is_out_of_memory(error):
            explain_out_of_memory(run)
        raise
    run.ended(outcome, code, message)
    run.guard.close(wait=outcome != "failed")
    leave()
    run.watchdog.close()
    return code


def _train(run: Run) -> None:
    """Take all steps, some of them again where the run goes back to a checkpoint."""
    watch, first_step = Watch(run), run.state.step + 1
    run.guard.stop_if_asked()
    run.guard.request.trains()
    try:
        while True:
            try:
                return _loop(run, watch, first_step)
            except RollBack as why:
                watch.roll_back(why)
    except RunStopped:
        # All ranks stop alike; the checkpoint being written is good, and the newest.
        try:
            finish_save(run)
        except RunStopped as unsaved:  # must not hide why the run stops
            run.event("failed", step=run.state.step, message=unsaved.message)
        raise


def _loop(run: Run, watch: Watch, first_step: int) -> None:
    """One optimizer step after the other. Syncs with the host only where it logs."""
    plan, every = run.plan, run.plan.run
    profiler = _profiler(run)
    with closing(run.stream()) as stream, profiler or nullcontext():
        # At step 0, and where the last stop broke an evaluation off.
        due = run.state.step == 0 or _due(run.state.step, every.eval.every)
        if due and run.held_out_nats is None and (line := _evaluated(run)):
            _log(run, line)
            watch.evaluated(line)
        watch.ends_early()  # a run that ended so goes on with more patience alone
        unsplit = unsplit_start(run)
        run.meter.restart()
        while run.state.step < run.total_steps:
            step = run.state.step + 1
            run.pulse("data", step)
            batches = next(stream)
            run.pulse("step", step)
            reads = run.next_step
            targets = run.data.train.targets_in(run.state.samples, reads.global_batch)
            seed_dropout(plan, step)
            lr = run.schedule.lr(step)
            with profiler.step(step) if profiler else nullcontext():
                result = watch.train_batch(batches, targets, lr)
            run.state = run.state.after(reads.global_batch, every.data.seq_len)
            run.meter.step_done(reads)
            watch.step_done(result.loss_share, result.grad_norm)
            if step == first_step:
                note_what_runs(run)
                if unsplit is not None:
                    check_norm(run, unsplit, result.grad_norm)
            compared = run.memory.step_done(step - first_step + 1)
            last = step == run.total_steps
            evaluates = last or _due(step, every.eval.every)
            if evaluates or _due(step, every.log.every):
                line = run.meter.line(
                    result.loss_share, result.grad_norm, targets, learning_rate=lr
                )
                line |= _evaluated(run) if evaluates else {}
                _log(run, line)
                watch.logged(line)
                last = watch.ends_early() or last
            watch.stop_if_diverged()
            note_memory(run, compared)
            if profiler:
                run.pulse("profile", step)  # which is no part of a step
                if profiler.after(step, batches[0]):
                    run.meter.restart()
            stop, written = run.stop_asked()
            if written:
                finish_save(run)
            saves = stop or last or _due(step, every.save.every)
            watch.check_replicas(saves)
            if saves:
                save(run, watch.known(), background=every.save.async_ and not (stop or last))
            if stop and not last:
                raise RunStopped(
                    ExitCode.STOPPED, f"asked to stop by {run.guard.received or 'a rank'}"
                )


def evaluate(run: Run) -> float | None:
    """Mean loss in nats over the target tokens of the first held-out samples; the same anywhere.

    None where a stop, which no evaluation need outlast, broke it off.
    """
    plan, stream = run.plan, run.data.held_out
    samples = min(plan.run.eval.samples, stream.samples)
    micro, ranks = plan.micro_batch, plan.grid.data
    first = plan.grid.coords(plan.world.rank).data * micro
    batches = []
    run.pulse("evaluation", run.state.step)
    # All ranks run equally often (ZeRO-3 gathers weights together); what is too much counts not.
    for start in range(0, samples, micro * ranks):
        batch = stream.batch(start + first, micro)
        batch.labels[max(0, samples - start - first) :] = -100
        batches.append(batch)
    sums = torch.zeros(2, dtype=torch.float64, device=run.engine.device)
    for start in range(0, len(batches), EVALUATED_AT_ONCE):
        if start and run.stop_asked()[0]:
            run.held_out_nats = None
            return None
        run.pulse("evaluation", run.state.step)
        sums += run.engine.eval_batch(batches[start : start + EVALUATED_AT_ONCE])
    loss, tokens = run.engine.sum_over_ranks(sums).tolist()
    run.meter.restart()
    assert tokens, "build requires a target in the samples of an evaluation"
    run.held_out_nats = loss / tokens
    return run.held_out_nats


def _evaluated(run: Run) -> dict[str, float]:
    """What an evaluation adds to a metrics line."""
    found = evaluate(run)
    return {} if found is None else {"eval_loss": found}


def _finish(run: Run) -> None:
    """Show what was learned, and export the weights. The last is rank 0's alone."""
    plan = run.plan
    found = evaluate(run) if run.held_out_nats is None else run.held_out_nats
    run.pulse("sample", run.state.step)
    small = run.data.train.tokens <= SMALL_CORPUS_TOKENS
    if run.is_writer and small and found is not None:
        run.progress.say(
            f"held-out loss {found:.2f} nats per token; token frequencies alone give "
            f"{run.data.unigram_nats:.2f}, counted pairs of tokens {run.data.bigram_nats:.2f}"
        )
    if plan.run.sample.tokens:
        text = sample_text(
            run.engine.next_token_logits,
            run.data.tokenizer,
            plan.run.sample.prompt or "",
            plan.run.sample.tokens,
            plan.run.data.seq_len,
            plan.run.train.seed,
        )
        run.progress.say(f"sample: {text!r}")
    if plan.run.save.export:
        _export(run)


def _export(run: Run) -> None:
    """Export the last checkpoint on rank 0, while the others wait, however long it takes. Raises
    RunStopped (cannot save) on all ranks where the disk is full: what was trained is saved.
    """
    plan, folder, problem = run.plan, run.folder.export_dir, None
    checkpoint = _last_checkpoint(run)
    run.watchdog.close()  # an export takes its time
    if run.is_writer:
        wish = Wish(
            check=plan.shape is not None and num_parameters(plan.shape) <= CHECKED_PARAMETERS,
            source=plan.model_source,
            trust_remote_code=run.engine.module.is_remote_code() or brings_code(run.data.tokenizer),
        )
        try:
            checked = export(checkpoint, folder, run.folder.tokenizer_dir, wish)
            run.progress.say(f"exported {folder}; {checked}")
        except Exception as error:
            if not is_full_disk(error):
                raise
            problem = str(error)
    # srun ends those that are left a minute after the first: all ranks end together.
    if (problem := run.guard.told_by_rank_0(problem)) is not None:
        raise RunStopped(
            ExitCode.CANNOT_SAVE,
            f"all steps are done, and {checkpoint.path} is whole, but it could not be exported "
            f"({problem}): make room, then run: python tools/export_hf.py {run.folder.path}",
        )


def _last_checkpoint(run: Run) -> Checkpoint:
    """Of the step that the run is at, verified; saved now where no step was taken. Collective."""
    found, _ = newest_usable(run.folder.checkpoints_dir)
    if found is None or found.state.step != run.state.step:
        save(run, run.known)
        found = verified(Store(run.folder.checkpoints_dir).at(run.state.step))
    return found


def _profiler(run: Run) -> Any:
    """What looks closer at profile.steps; None where no step of this process is among them."""
    window = run.plan.run.profile.window
    if window is None or window[1] <= run.state.step:
        return None
    from harness.run.profiling import Profiler

    return Profiler(run.plan, run.engine, run.folder.profile_dir, run.progress.say)


def _log(run: Run, line: dict[str, Any]) -> None:
    """Complete a metrics line, write it, show it, and pass it to the JSON's monitors."""
    line = {
        "step": run.state.step,
        "samples": run.state.samples,
        "tokens": run.state.tokens,
        "loss_scale": run.engine.loss_scale,
        "skipped_steps": run.engine.skipped_steps,
        **line,
    }
    if run.is_writer:
        run.folder.append_metrics(line)
        run.engine.write_monitors(monitor_events(line))
        run.progress.step(line)


def seed_dropout(plan: Plan, step: int) -> None:
    """Dropout as a function of (seed, step, rank): a resumed run has no generator to restore."""
    text = f"dropout:{plan.run.train.seed}:{step}:{plan.world.rank}"
    digest = hashlib.sha256(text.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
