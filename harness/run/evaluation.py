"""Evaluates a run on held-out data."""

import math

import torch

from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.data.needles import DEPTHS, NEEDLE_TEXTS, needles
from harness.engine.api import ByGroup
from harness.run.run import Run

EVALUATED_AT_ONCE = 8  # micro-batches between checks for a stop
POSITIONS = 64
"""Largest number of position ranges with separate losses."""


def evaluate(run: Run) -> float | None:
    """Return the held-out loss from `mean_losses`, and record it in the run. Collective."""
    run.held_out_nats, _ = mean_losses(run, run.data.held_out)
    return run.held_out_nats


def evaluate_by_position(run: Run) -> tuple[float | None, list[float | None]]:
    """Return the held-out loss, recorded in the run, and the loss of equal ranges of positions up
    to eval.seq_len, in order of increasing context. Collective.
    """
    longer = run.data.long_held_out
    buckets = 0 if run.engine.setup.preferences else min(POSITIONS, run.plan.seq_len)
    nats, by_position = mean_losses(run, run.data.held_out, 0 if longer else buckets)
    if longer is not None and nats is not None:
        by_position = mean_losses(run, longer, buckets)[1]
    run.held_out_nats = nats
    return nats, by_position


def evaluate_needles(run: Run) -> dict[str, list[float]]:
    """Return, by metric, the geometric mean probability of the requested numbers' tokens at each of
    DEPTHS, for each length of eval.needle_lengths. A stop leaves out the rest. Collective.
    """
    plan, probabilities = run.plan, dict[str, list[float]]()
    for length in plan.config.eval.needle_lengths:
        rows = rows_of(run, length)
        batches = [
            needles(run.data.held_out, run.data.tokenizer, length, start, rows)
            for start in plan.share.starts(NEEDLE_TEXTS, rows)
        ]
        sums = summed(run, [*batches], len(DEPTHS))
        if sums is None:
            break
        probabilities[f"needle/{length}"] = [math.exp(-nats / tokens) for nats, tokens in sums[1:]]
    return probabilities


def evaluate_sets(run: Run) -> dict[str, float]:
    """Return, by metric, the loss of each named held-out set and of the data of data.rehearse. The
    first set has been evaluated before. A stop leaves out the rest. Collective.
    """
    losses = dict[str, float]()
    streams = {f"eval_loss/{name}": stream for name, stream in run.data.eval_sets.items()}
    if run.data.old is not None:
        streams["old_eval_loss"] = run.data.old
    for name, stream in streams.items():
        nats = run.held_out_nats
        if stream is not run.data.held_out:
            nats, _ = mean_losses(run, stream)
        if nats is None:
            break
        losses[name] = nats
    return losses


def mean_losses(
    run: Run, stream: Stream, buckets: int = 0
) -> tuple[float | None, list[float | None]]:
    """Return the mean loss in nats per target token over the first samples of a stream, equal in
    any layout; and that of each of `buckets` ranges of positions, None for one without targets.
    Returns (None, []) if a stop interrupted the evaluation. Collective.
    """
    plan, batches, at_once = run.plan, list[Batch](), stream.at_once
    rows = rows_of(run, stream.seq_len)
    tokens = plan.config.eval.samples * plan.seq_len
    samples = min(-(-tokens // stream.seq_len), stream.samples)
    at_once = min(at_once, samples)
    # All ranks run the same number of passes (ZeRO-3 gathers are collective): padding samples are
    # masked out.
    for start in plan.share.starts(at_once, rows):
        for first in range(start, start + samples, at_once):
            batch = stream.batch(first, rows)
            batch.labels[max(0, at_once - start) :] = -100
            batches.append(batch)
    sums = summed(run, batches, buckets)
    if sums is None:
        return None, []
    assert sums[0][1], "build requires a target in the samples of an evaluation"
    means = [nats / targets if targets else None for nats, targets in sums]
    return means[0], means[1:]


def rows_of(run: Run, length: int) -> int:
    """Return the samples per micro-batch: at least one, with no more tokens than in training."""
    return max(1, run.plan.micro_batch * run.plan.seq_len // length)


def summed(run: Run, batches: list[Batch], buckets: int) -> list[tuple[float, float]] | None:
    """Return (nats, targets) summed over all ranks' micro-batches, followed by those of each of
    `buckets` ranges of positions; None if a stop interrupted the evaluation. Collective.
    """
    run.pulse("evaluation", run.state.step)
    sums = torch.zeros(1 + buckets, 2, dtype=torch.float64, device=run.engine.device)
    groups, longest = None, run.plan.seq_len
    if buckets:  # equal ranges of the number of tokens that a target's input token can attend to
        groups = ByGroup(
            sums[1:], lambda batch: batch.buckets(buckets, max(longest, batch.labels.shape[1]))
        )
    for first in range(0, len(batches), EVALUATED_AT_ONCE):
        if first and run.stop_asked()[0]:
            return None
        run.pulse("evaluation", run.state.step)
        chunk = batches[first : first + EVALUATED_AT_ONCE]
        sums[0] += run.engine.eval_batch(chunk, groups)
    # Over all ranks: tensor-parallel ranks that round differently must not differ in a decision.
    values = run.sum(sums.flatten() / run.plan.grid.tensor, over="norm")
    run.meter.restart()
    return [*zip(values[::2], values[1::2], strict=True)]
