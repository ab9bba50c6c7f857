"""Checks of divided rows on two ranks."""

from __future__ import annotations

from typing import Any

import torch

from harness.data.batch import Batch
from tests.engine.rank import engine_of, losses, run_checks, share_of, stage
from tests.engine.small import SEQ_LEN


def divided(zero: int = 1) -> dict[str, Any]:
    return {**stage(zero), "sequence_parallel_size": 2}


def row_logits() -> dict[str, float]:
    """The largest distance from the undivided model's: logits, an evaluation's sums, losses."""
    ids = torch.arange(5)[None] + 3  # an odd number of tokens
    results = []
    for ds in (stage(1), divided(3)):
        engine = engine_of(ds)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        before = engine.next_token_logits(ids)
        results.append((before, sums, losses(engine, 3), engine.next_token_logits(ids)))
        engine.close()
    (logits, sums, falling, after), (theirs, their_sums, their_falling, later) = results
    return {
        "logits": float((logits - theirs).abs().max()),
        "later": float((after - later).abs().max()),
        "moved": float((after - logits).abs().max()),
        "sums": float((sums - their_sums).abs().max()),
        "losses": max(abs(a - b) for a, b in zip(falling, their_falling, strict=True)),
    }


def short_rows() -> float:
    """The distance of the loss of rows read as pieces of a quarter, as at the start of a ramp."""
    sums = []
    for ds in (stage(1), divided(1)):
        engine = engine_of(ds)
        batches = [batch.cut(4) for batch in share_of(engine)[0]]
        sums.append(engine.sum_over_ranks(engine.eval_batch(batches)))
        engine.close()
    return float((sums[0] - sums[1]).abs().max())


def documents_kept() -> dict[str, float]:
    """Return the change of losses by the document before, whose first half another rank has."""
    engine = engine_of(divided(1))
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % 24
    other = ids.clone()
    other[:, : SEQ_LEN // 2 - 2] = 23 - other[:, : SEQ_LEN // 2 - 2]  # of the first document
    labels = torch.full_like(ids, -100)
    labels[:, -1] = 3
    end = SEQ_LEN // 2 - 2
    apart = torch.cat([torch.arange(end), torch.arange(SEQ_LEN - end)]).expand(2, -1).contiguous()
    distances = {}
    for name, positions in (("apart", apart), ("together", None)):
        both = [
            engine.sum_over_ranks(engine.eval_batch([Batch(tokens, labels, positions)]))[0]
            for tokens in (ids, other)
        ]
        distances[name] = abs(float(both[0] - both[1]))
    engine.close()
    return distances


CHECKS = (row_logits, short_rows, documents_kept)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
