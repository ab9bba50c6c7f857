"""Rising batch size and sequence length in a plan (ramp.*), and its checks."""

from __future__ import annotations

from harness.config.curriculum import Curriculum
from harness.plan.draft import Draft

MAX_RISES = 10_000
"""Most rises of the batch: counting steps takes time for each."""


def ramp(draft: Draft) -> None:
    """Check ramp.* and set the draft's curriculum."""
    problems_before = len(draft.problems)
    _check_pairs(draft)
    _check_batch(draft)
    _check_length(draft)
    if len(draft.problems) > problems_before:
        draft.curriculum = Curriculum(draft.config.train.global_batch)
    else:
        draft.curriculum = draft.config.curriculum


def note_unfinished_ramp(draft: Draft) -> None:
    """Add an event if the run ends before batch and length have risen."""
    curriculum, seq_len, steps = draft.curriculum, draft.config.data.seq_len, draft.steps
    if not steps or not curriculum.rises:
        return
    last = curriculum.at(curriculum.samples_after(steps - 1))
    if last.global_batch < curriculum.global_batch or last.pieces > 1:
        draft.note(
            "unfinished_ramp",
            f"the run ends within its ramp (ramp.*): its last step reads {last.global_batch} "
            f"windows in sequences of {seq_len // last.pieces} tokens",
        )


def _check_pairs(draft: Draft) -> None:
    ramp = draft.config.ramp
    for pair in (("batch_from", "batch_tokens"), ("length_from", "length_tokens")):
        missing = [name for name in pair if getattr(ramp, name) is None]
        if len(missing) == 1:
            (present,) = set(pair) - {*missing}
            why = f"but not ramp.{missing[0]}"
            draft.problems.add(f"ramp.{present}", why, "set both, or neither")
    if ramp.batch_step is not None and ramp.batch_from is None:
        draft.problems.add(
            "ramp.batch_step", "but ramp.batch_from is not given", "set ramp.batch_from, too"
        )


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
