"""The held-out loss of a run."""

from __future__ import annotations

import torch

from harness.run.run import Run

EVALUATED_AT_ONCE = 8  # micro-batches between two checks for a stop


def evaluate(run: Run) -> float | None:
    """Return the mean loss, in nats over the target tokens of the first held-out samples, which is
    the same in any layout. Collective.

    None if a stop interrupted the evaluation.
    """
    plan, stream = run.plan, run.data.held_out
    samples = min(plan.config.eval.samples, stream.samples)
    batches = []
    run.pulse("evaluation", run.state.step)
    # All ranks run equally often (ZeRO-3 gathers weights together): padding samples are masked out.
    for start in plan.share.starts(samples, plan.micro_batch):
        batch = stream.batch(start, plan.micro_batch)
        batch.labels[max(0, samples - start) :] = -100
        batches.append(batch)
    sums = torch.zeros(2, dtype=torch.float64, device=run.engine.device)
    for first in range(0, len(batches), EVALUATED_AT_ONCE):
        if first and run.stop_asked()[0]:
            run.held_out_nats = None
            return None
        run.pulse("evaluation", run.state.step)
        sums += run.engine.eval_batch(batches[first : first + EVALUATED_AT_ONCE])
    loss, tokens = run.sum(sums)
    run.meter.restart()
    assert tokens, "build requires a target in the samples of an evaluation"
    run.held_out_nats = loss / tokens
    return run.held_out_nats
