"""The length of a run: what it says of it, and notes where it is too short to learn."""

from __future__ import annotations

import math

from harness.config.run_config import RunConfig
from harness.plan.counted import Counts, open_keys
from harness.plan.draft import Draft
from harness.plan.plan import Event, Plan

FEW_STEPS = 20
"""Fewer, where they follow from the data, are noted."""


def note_length(draft: Draft) -> None:
    """Add events for a run that is too short, where its steps are known before its data is."""
    if draft.steps is not None:
        draft.events += length_events(draft.config, draft.steps)


def length_events(config: RunConfig, steps: int) -> list[Event]:
    """Return an event if a run ends within its warm-up, and one if its data makes few steps."""
    optim, train, events = config.optim, config.train, list[Event]()
    if not steps:
        return events
    warmup = optim.warmup(steps)
    if steps < warmup:
        message = (
            f"the run of {steps:,} steps ends within its warm-up ({warmup:,} steps, "
            f"{optim.warmup_key}): optim.lr is never reached; set optim.warmup_ratio=0.03 in its "
            "place, or train longer"
        )
        events.append({"kind": "unfinished_warmup", "message": message})
    length = "train.epochs" if train.epochs is not None else "train.tokens"
    if steps < FEW_STEPS and train.steps is None:  # else somebody asked for so many
        count = "1 step" if steps == 1 else f"{steps:,} steps"
        message = (
            f"the run takes only {count}, and each moves a weight by about the learning "
            f"rate: lower train.global_batch (now {train.global_batch:,}), or raise {length}"
        )
        events.append({"kind": "few_steps", "message": message})
    return events


def steps_of(plan: Plan, counts: Counts) -> int:
    """Return the optimizer steps of a run whose data is counted."""
    if plan.steps is not None:
        return plan.steps
    assert plan.config.train.epochs is not None, "a run has a length"
    return plan.curriculum.steps_for(math.ceil(plan.config.train.epochs * counts.windows))


def length_text(plan: Plan, steps: int | None, counts: Counts | None) -> str:
    """Return the length of a run, of data that may be counted."""
    train, data = plan.config.train, plan.config.data
    if steps is None:
        passes = "1 epoch" if train.epochs == 1 else f"{train.epochs:g} epochs"
        about = "about " * ("train.epochs" in open_keys(plan))
        return f"{about}{passes}: the data will say how many steps"
    samples = plan.curriculum.samples_after(steps)
    read = f"{samples:,} examples"
    if data.batching == "packed":
        read = f"{samples * data.seq_len:,} tokens"
    text = f"{steps:,} steps = {read}"
    return f"{text}: {_counted(plan, samples, counts)}" if counts and steps else text


def _counted(plan: Plan, samples: int, counts: Counts) -> str:
    """Return the examples and windows of data that is counted, and how often a run of so many
    windows reads it.
    """
    data, batch = plan.config.data, plan.global_batch
    noun = "examples" if counts.is_masked else "documents"
    rows = f"{counts.examples:,} {noun}"
    if data.batching == "packed":
        rows += f" in {counts.windows:,} windows of {data.seq_len:,} tokens"
    unit = "window" if data.batching == "packed" else "example"
    a_step = f"{'up to ' * plan.curriculum.rises}{batch:,} {unit}{'s' * (batch != 1)} a step"
    epochs = samples / counts.windows
    return f"{'roughly ' * counts.is_rough}{rows}, {a_step}, {epochs:.3g} epochs"
