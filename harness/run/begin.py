"""Begins a run: records it, and loads the checkpoint that it begins with."""

from __future__ import annotations

from typing import Any

from harness.checkpoint.export import replacing, sweep
from harness.data.kept_tokenizer import save_generation, save_tokenizer
from harness.run.probe import check_probe
from harness.run.progress import clock
from harness.run.resumption import Beginning, load_into
from harness.run.run import Run
from harness.run.sampling import question_of, show_sample
from harness.runfolder import RunFolder


def begin(
    run: Run,
    record: dict[str, Any],
    events: list[dict[str, Any]],
    beginning: Beginning,
) -> None:
    """Record the run, and load the checkpoint that it begins with. Collective."""
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
        parent = None
        if beginning.checkpoint is not None:
            parent = RunFolder(beginning.checkpoint.path.parents[1]).tokenizer_dir
        sweep(run.folder.tokenizer_dir, alone=True)  # after a kill while it was written
        with replacing(run.folder.tokenizer_dir) as unfinished:
            save_tokenizer(run.data.tokenizer, unfinished)
            save_generation(run.engine.module, unfinished, parent)
    _load(run, beginning)
    if run.is_writer:
        run.trackers.open(run.plan.config.log, run.folder, record, run.state.step)


def _load(run: Run, beginning: Beginning) -> None:
    """Load the checkpoint that the run begins with, if there is one. Collective."""
    checkpoint, kind = beginning.checkpoint, beginning.kind
    if checkpoint is None:
        if run.plan.config.model.init_from is not None and question_of(run):
            show_sample(run, "sample before training")
        if run.folder.attempt > 1:
            run.event("began_again", message="no checkpoint was saved before")
            run.progress.say("no checkpoint was saved yet: begins at step 0 again")
        return
    load_into(run.engine, checkpoint, weights_only=kind == "weights")
    check_probe(run.engine, checkpoint, run.plan)
    if kind != "weights":
        run.steps.move(checkpoint.state)
        watch = dict(checkpoint.manifest.watch)
        if kind == "branched":  # to try something else, with as much patience
            watch.pop("patience", None)
        run.judge.restore(watch)
        run.held_out_nats = checkpoint.manifest.held_out_loss
    run.event(
        kind,
        step=run.state.step,
        path=str(checkpoint.path),
        manifest=checkpoint.manifest.checksum,
        changes=beginning.changes,
    )
    step, source = checkpoint.state.step, checkpoint.path.parents[1]
    if kind == "weights":
        run.progress.say(f"begins with the weights of step {step:,} of {source}")
    else:
        run.progress.say(f"{kind} {checkpoint.path.name} of {run.steps.total} steps")
