"""The chunked loss in the real engine: the same number of gathers, evaluations, fallback."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.engine.engines import batches, engine_of, losses, share_of, stage
from tests.ranks import ranks

CHUNK = 24  # of 64 entries


def count_gathers(engine: Any) -> int:
    """Return how often two micro-batches gather the head's weight with ZeRO 3. Collective."""
    head: Any = engine.module.get_output_embeddings().weight
    count = 0

    def counted(gather: Any) -> Any:
        def gather_and_count(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += any(parameter is head for parameter in parameters)
            return gather(parameters, *args, **kwargs)

        return gather_and_count

    parameter: Any
    for parameter in engine.module.parameters():
        parameter.all_gather_coalesced = counted(parameter.all_gather_coalesced)
    engine.accumulate(*batches())
    return count


@ranks(2)
def test_chunks_gather_no_more_and_evaluate_the_same_under_zero_3() -> None:
    values, gathers = [], []
    for chunk in (0, CHUNK):
        engine = engine_of(stage(3), model={"loss_chunk": chunk})
        before = losses(engine, 2)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        # In the steps after the evaluation, DeepSpeed learns the order of the modules.
        values.append([*before, *sums.tolist(), *losses(engine, 2)])
        gathers.append(count_gathers(engine))
        engine.close()
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert 0 < gathers[1] <= gathers[0]


@ranks(2)
def test_a_model_without_chunks_trains_with_an_event() -> None:
    from harness.engine import build  # imports DeepSpeed

    why = ValueError("the logits of Some are not those of its output head")
    with mock.patch.object(build, "operations_on_logits", side_effect=why):
        engine = engine_of(stage(1), model={"loss_chunk": CHUNK})
    first, second = losses(engine, 2)
    assert second < first
    (event,) = (event for event in engine.events if event["kind"] == "loss_not_chunked")
    assert "model.loss_chunk" in event["message"]
    assert "the logits of Some are not those of its output head" in event["message"]
    engine.close()
