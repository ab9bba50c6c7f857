"""How batch size and sequence length rise in a plan, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.config.curriculum import Curriculum
from harness.config.run_config import RunConfig

MAX_RISES = 10_000
"""Of the batch: each is a piece of every count of steps."""


def curriculum_of(run: RunConfig) -> Curriculum:
    """What ramp.* comes to, where `curriculum_problems` has none."""
    ramp, seq_len = run.ramp, run.data.seq_len
    return Curriculum(
        global_batch=run.train.global_batch,
        batch_from=ramp.batch_from,
        batch_step=ramp.batch_step,
        batch_samples=-(-(ramp.batch_tokens or 0) // seq_len),
        most_pieces=seq_len // (ramp.length_from or seq_len),
        length_samples=-(-(ramp.length_tokens or 0) // seq_len),
    )


def curriculum_notes(run: RunConfig, curriculum: Curriculum) -> list[dict[str, Any]]:
    """An event where the run ends before batch and length have risen."""
    seq_len = run.data.seq_len
    steps = run.train.num_steps(curriculum, seq_len)
    if not steps or not curriculum.rises:
        return []
    last = curriculum.at(curriculum.samples_after(steps - 1))
    if last.global_batch == curriculum.global_batch and last.pieces == 1:
        return []
    message = (
        f"the run ends within its ramp (ramp.*): its last step reads {last.global_batch} samples "
        f"in sequences of {seq_len // last.pieces} tokens"
    )
    return [{"kind": "unfinished_ramp", "message": message}]


def curriculum_problems(run: RunConfig) -> Iterator[str]:
    """What is wrong with ramp.*."""
    ramp, batch, seq_len = run.ramp, run.train.global_batch, run.data.seq_len
    for first, over in (("batch_from", "batch_tokens"), ("length_from", "length_tokens")):
        given = [name for name in (first, over) if getattr(ramp, name) is not None]
        if len(given) == 1:
            missing = over if given == [first] else first
            given_key = f"ramp.{given[0]}"
            asked = f"{given_key} is {run.get(given_key)} ({run.origin(given_key)})"
            yield f"{asked}, but not ramp.{missing}: set both, or neither"
    if ramp.batch_step is not None and ramp.batch_from is None:
        asked = f"ramp.batch_step is {ramp.batch_step} ({run.origin('ramp.batch_step')})"
        yield f"{asked}, but ramp.batch_from is not given: set it"
    if ramp.batch_from is not None:
        asked = f"ramp.batch_from is {ramp.batch_from} ({run.origin('ramp.batch_from')})"
        step = ramp.batch_step or ramp.batch_from
        if ramp.batch_from >= batch:
            yield f"{asked}: it must be less than train.global_batch, which is {batch}"
        elif (batch - ramp.batch_from) % step:
            below = batch - (batch - ramp.batch_from) % step
            yield (
                f"{asked}, from which steps of {step} (ramp.batch_step) do not reach "
                f"train.global_batch {batch}: set that to {below} or {below + step}"
            )
        elif (rises := (batch - ramp.batch_from) // step) > MAX_RISES:
            least = -(-step * rises // MAX_RISES)
            yield f"{asked}, and rises {rises:,} times: set ramp.batch_step to {least} or more"
    if ramp.length_from is not None:
        halved = [seq_len >> n for n in range(1, seq_len.bit_length()) if not seq_len % 2**n]
        legal = [length for length in halved if length >= 2]
        if ramp.length_from not in legal:
            yield (
                f"ramp.length_from is {ramp.length_from} ({run.origin('ramp.length_from')}): it "
                f"must double to data.seq_len {seq_len}: one of "
                f"{', '.join(map(str, legal)) or 'none'}"
            )
