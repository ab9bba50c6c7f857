"""Sequence parallelism on two ranks: the undivided model's logits, losses and documents."""

from __future__ import annotations

from typing import Any

import torch

from harness.data.batch import Batch
from tests.engine.engines import engine_of, losses, share_of, stage
from tests.engine.small import SEQ_LEN
from tests.ranks import ranks


def divided(zero: int = 1) -> dict[str, Any]:
    return {**stage(zero), "sequence_parallel_size": 2}


@ranks(2)
def test_logits_losses_and_an_evaluation_are_the_undivided_models() -> None:
    ids = torch.arange(5)[None] + 3  # an odd number of tokens
    results = []
    for ds in (stage(1), divided(3)):
        engine = engine_of(ds)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        before = engine.next_token_logits(ids)
        results.append((before, sums, losses(engine, 3), engine.next_token_logits(ids)))
        engine.close()
    (logits, sums, falling, after), (theirs, their_sums, their_falling, later) = results
    assert (logits - theirs).abs().max() < 1e-6
    assert (sums - their_sums).abs().max() < 1e-4  # sum of some hundred tokens, nats
    assert max(abs(a - b) for a, b in zip(falling, their_falling, strict=True)) < 1e-5
    assert (after - later).abs().max() < 1e-4
    assert (after - logits).abs().max() > 0.01


@ranks(2)
def test_shorter_rows_at_the_start_of_a_ramp_are_divided_too() -> None:
    sums = []
    for ds in (stage(1), divided(1)):
        engine = engine_of(ds)
        batches = [batch.cut(4) for batch in share_of(engine)[0]]  # rows of a quarter of the length
        sums.append(engine.sum_over_ranks(engine.eval_batch(batches)))
        engine.close()
    assert (sums[0] - sums[1]).abs().max() < 1e-4


@ranks(2)
def test_tokens_attend_within_their_document_across_ranks() -> None:
    """The first half of the previous document is on another rank."""
    engine = engine_of(divided(1))
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % 24
    end = SEQ_LEN // 2 - 2  # of the first document
    other = ids.clone()
    other[:, :end] = 23 - other[:, :end]
    labels = torch.full_like(ids, -100)
    labels[:, -1] = 3
    apart = torch.cat([torch.arange(end), torch.arange(SEQ_LEN - end)]).expand(2, -1).contiguous()

    def change_by_first_document(positions: torch.Tensor | None) -> float:
        first, second = (
            engine.sum_over_ranks(engine.eval_batch([Batch(tokens, labels, positions)]))[0]
            for tokens in (ids, other)
        )
        return abs(float(first - second))

    assert change_by_first_document(apart) == 0
    assert change_by_first_document(None) > 1e-4
    engine.close()
