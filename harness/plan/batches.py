"""Batches in a plan: grouping by length, ramps, evaluations, and the number of steps."""

from __future__ import annotations

import math

from harness.config.batch import Curriculum
from harness.config.ds_json import Event
from harness.config.run_config import RunConfig
from harness.layout.families import given_size
from harness.plan.batch_from_data import Counts, open_keys
from harness.plan.plan import Draft, Plan
from harness.plan.rotary import or_longer, positions_of

_KEY = "data.batching"


def decide_batching(draft: Draft) -> None:
    """Derive the micro-batch from data.tokens_per_batch; reject what needs equal sample lengths."""
    run = draft.config
    if run.data.batching == "packed":
        return
    one_shape = "stages exchange tensors of one shape: use ZeRO 3 instead of stages"
    separately = "every length would be compiled separately: remove model.compile"
    of_documents = "a step's tokens depend on its documents: set train.steps or train.epochs"
    for key, is_on, why in (
        ("pipeline.stages", draft.grid.pipeline > 1, one_shape),
        ("model.compile", run.model.compile, separately),
        (
            *("ramp.length_from", run.ramp.length_from is not None),
            "documents would be cut: remove ramp.length_from",
        ),
        ("train.tokens", run.train.tokens is not None, of_documents),
    ):
        if is_on:
            why = f"but with {key} ({draft.origin(key)}) {why}, or use {_KEY}=packed"
            draft.problems.add(_KEY, why)
    if run.data.tokens_per_batch is None:
        return
    key, micro_batch = "train.micro_batch", run.data.tokens_per_batch // run.data.seq_len
    if run.train.micro_batch not in (None, micro_batch):
        why = (
            f"which makes micro-batches of {micro_batch} windows of data.seq_len "
            f"{run.data.seq_len}, but {key} is {run.train.micro_batch} ({run.origin(key)})"
        )
        draft.problems.add("data.tokens_per_batch", why, "remove one of them")
    draft.config = run.changed({key: micro_batch})


def mark_padding(draft: Draft) -> None:
    """Mask padding from the routers of experts, unless the user set data.document_mask."""
    data = draft.config.data
    has_experts = given_size(draft.model_config, "experts") is not None
    if data.batching == "packed" or data.document_mask is not None or not has_experts:
        return
    draft.config = draft.config.changed({"data.document_mask": True})
    draft.note(
        "marked_padding",
        "data.document_mask is true, so that padding does not count in the balance of routers",
    )


MAX_RISES = 10_000
"""Maximum number of batch increases; counting steps takes time for each."""


def ramp(draft: Draft) -> None:
    """Check ramp.* and set the draft's curriculum."""
    problems_before = len(draft.problems)
    _check_pairs(draft)
    _check_batch(draft)
    _check_length(draft)
    if len(draft.problems) == problems_before:
        draft.curriculum = draft.config.curriculum
    else:
        draft.curriculum = Curriculum(draft.config.train.global_batch)


def note_unfinished_ramp(draft: Draft) -> None:
    """Note that the run ends before its ramp does."""
    curriculum, seq_len, steps = draft.curriculum, draft.config.data.seq_len, draft.steps
    if not steps or not curriculum.rises:
        return
    last = curriculum.at(curriculum.samples_after(steps - 1))
    if last.global_batch < curriculum.global_batch or last.pieces > 1:
        draft.note(
            "unfinished_ramp",
            f"the run ends during its ramp (ramp.*): its last step reads {last.global_batch} "
            f"windows in sequences of {seq_len // last.pieces} tokens",
        )


def _check_pairs(draft: Draft) -> None:
    ramp = draft.config.ramp
    for present, other in (
        *(("batch_from", "batch_tokens"), ("batch_tokens", "batch_from")),
        *(("length_from", "length_tokens"), ("length_tokens", "length_from")),
    ):
        if getattr(ramp, present) is not None and getattr(ramp, other) is None:
            draft.problems.add(f"ramp.{present}", f"but not ramp.{other}", "set both, or neither")
    if ramp.batch_step is not None and ramp.batch_from is None:
        why = "but ramp.batch_from is not set"
        draft.problems.add("ramp.batch_step", why, "set ramp.batch_from, too")


def _check_batch(draft: Draft) -> None:
    ramp, batch, problems = draft.config.ramp, draft.config.train.global_batch, draft.problems
    key = "ramp.batch_from"
    if ramp.batch_from is None:
        return
    step = ramp.batch_step or ramp.batch_from
    if ramp.batch_from >= batch:
        problems.add(key, f"it must be less than train.global_batch, which is {batch}")
    elif (batch - ramp.batch_from) % step:
        below = batch - (batch - ramp.batch_from) % step
        problems.add(
            key,
            f"from which steps of {step} (ramp.batch_step) do not reach train.global_batch {batch}",
            f"set train.global_batch to {below} or {below + step}",
        )
    elif (rises := (batch - ramp.batch_from) // step) > MAX_RISES:
        least = -(-step * rises // MAX_RISES)
        problems.add(key, f"and rises {rises:,} times", f"set ramp.batch_step to {least} or more")


def _check_length(draft: Draft) -> None:
    first, seq_len = draft.config.ramp.length_from, draft.config.data.seq_len
    if first is None:
        return
    halved = [seq_len >> n for n in range(1, seq_len.bit_length()) if not seq_len % 2**n]
    legal = [length for length in halved if length >= 2]
    if first not in legal:
        lengths = ", ".join(map(str, legal)) or "none"
        why = f"it must double to data.seq_len {seq_len}: one of {lengths}"
        draft.problems.add("ramp.length_from", why)


_LONGER, _NEEDLES = "eval.seq_len", "eval.needle_lengths"


def check_evaluation(draft: Draft) -> None:
    """Reject lengths that the model, the data or the ranks cannot evaluate."""
    run, problems = draft.config, draft.problems
    longer, needles = run.eval.seq_len, run.eval.needle_lengths
    if longer is not None and longer < run.data.seq_len:
        problems.add(_LONGER, f"it must be at least data.seq_len, which is {run.data.seq_len}")
    if longer is not None and run.data.batching != "packed":
        why = f"but data.batching={run.data.batching} does not cut text into windows"
        problems.add(_LONGER, why)
    _, limit = positions_of(draft.model_config)
    for key, lengths in ((_LONGER, [longer] if longer else []), (_NEEDLES, needles)):
        if limit and max(lengths, default=0) > limit:
            why = f"but {run.model.name} has {limit} positions"
            way = or_longer(draft.model_config, run, max(lengths))
            problems.add(key, why, f"use at most {limit}{way}")
        if any(length % draft.grid.sequence for length in lengths):
            problems.add(key, f"{draft.grid.sequence} sequence ranks cannot divide it")


FEW_STEPS = 20
"""Runs with fewer steps are noted if the data determines the number."""
USEFUL_EPOCHS = 16
"""Further ones add little: Scaling Data-Constrained Language Models (arXiv 2305.16264), fig. 3."""


def note_length(draft: Draft) -> None:
    """Note that a run is too short, if its steps are known before the data is counted."""
    if draft.steps is not None:
        draft.events += length_events(draft.config, draft.steps)


def length_events(config: RunConfig, steps: int) -> list[Event]:
    """Return an event if a run ends during warm-up, and one if its data gives few steps."""
    optim, train, events = config.optim, config.train, list[Event]()
    if not steps:
        return events
    warmup = optim.warmup(steps)
    if steps < warmup:
        message = (
            f"the run of {steps:,} steps ends during its warm-up ({warmup:,} steps, "
            f"{optim.warmup_key}): optim.lr is never reached; set optim.warmup_ratio=0.03 "
            "instead, or train longer"
        )
        events.append({"kind": "unfinished_warmup", "message": message})
    length = "train.epochs" if train.epochs is not None else "train.tokens"
    if steps < FEW_STEPS and train.steps is None:  # otherwise the user asked for this number
        count = "1 step" if steps == 1 else f"{steps:,} steps"
        message = (
            f"the run takes only {count}, and each moves a weight by about the learning "
            f"rate: lower train.global_batch (now {train.global_batch:,}), or raise {length}"
        )
        events.append({"kind": "few_steps", "message": message})
    return events


def repetition_events(plan: Plan, steps: int, counts: Counts) -> list[Event]:
    """Return an event if a run reads its data more often than helps, unless the user set epochs."""
    epochs = plan.curriculum.samples_after(steps) / counts.windows
    train = plan.config.train
    if epochs <= USEFUL_EPOCHS or train.epochs is not None:
        return []
    length = "train.tokens" if train.tokens is not None else "train.steps"
    message = (
        f"the run reads its data {epochs:,.0f} times, and more than about {USEFUL_EPOCHS} times "
        f"help little (arXiv 2305.16264): give data.path more text, or lower {length}"
    )
    return [{"kind": "repeated_data", "message": message}]


def steps_of(plan: Plan, counts: Counts) -> int:
    """Return the optimizer steps of a run whose data is counted."""
    if plan.steps is not None:
        return plan.steps
    assert plan.config.train.epochs is not None, "a run has a length"
    return plan.curriculum.steps_for(math.ceil(plan.config.train.epochs * counts.windows))


def length_text(plan: Plan, steps: int | None, counts: Counts | None) -> str:
    """Return the length of a run as text; `counts` adds details if the data is counted."""
    train, data = plan.config.train, plan.config.data
    if steps is None:
        passes = "1 epoch" if train.epochs == 1 else f"{train.epochs:g} epochs"
        about = "about " * ("train.epochs" in open_keys(plan))
        return f"{about}{passes}; the number of steps is known once the data is counted"
    samples = plan.curriculum.samples_after(steps)
    read = f"{samples:,} examples"
    if data.batching == "packed":
        read = f"{samples * data.seq_len:,} tokens"
    text = f"{steps:,} steps = {read}"
    return f"{text}: {_counted(plan, samples, counts)}" if counts and steps else text


def _counted(plan: Plan, samples: int, counts: Counts) -> str:
    """Return the examples and windows, and the epochs that a run of `samples` windows makes."""
    data, batch = plan.config.data, plan.global_batch
    noun = "examples" if counts.is_masked else "documents"
    rows = f"{counts.examples:,} {noun}"
    if data.batching == "packed":
        rows += f" in {counts.windows:,} windows of {data.seq_len:,} tokens"
    unit = "window" if data.batching == "packed" else "example"
    a_step = f"{'up to ' * plan.curriculum.rises}{batch:,} {unit}{'s' * (batch != 1)} per step"
    epochs = samples / counts.windows
    return f"{'roughly ' * counts.is_rough}{rows}, {a_step}, {epochs:.3g} epochs"
