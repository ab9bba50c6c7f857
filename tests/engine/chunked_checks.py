"""Checks of the loss in chunks on two ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

from harness.engine import build
from tests.engine.rank import batches, engine_of, losses, run_checks, share_of, stage

CHUNK = 24  # of 64 entries


def chunked_gathers() -> dict[str, int]:
    """Gathers of the head's weight under ZeRO 3 over two micro-batches, with chunks and without."""
    gathers = {}
    for chunk in (0, CHUNK):
        engine = engine_of(stage(3), model={"loss_chunk": chunk})
        losses(engine, 2)  # DeepSpeed learns the order of the modules
        head: Any = engine.module.get_output_embeddings().weight
        count = 0

        def counted(gather: Any, head: Any = head) -> Any:
            def gather_and_count(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += any(parameter is head for parameter in parameters)
                return gather(parameters, *args, **kwargs)

            return gather_and_count

        parameter: Any
        for parameter in engine.module.parameters():
            parameter.all_gather_coalesced = counted(parameter.all_gather_coalesced)
        engine.accumulate(*batches())
        gathers[str(chunk)] = count
        engine.close()
    return gathers


def chunked_evaluation() -> dict[str, list[float]]:
    """Held-out sums and losses of steps around them, under ZeRO 3, with chunks and without."""
    values = {}
    for chunk in (0, CHUNK):
        engine = engine_of(stage(3), model={"loss_chunk": chunk})
        before = losses(engine, 2)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        values[str(chunk)] = [*before, *sums.tolist(), *losses(engine, 2)]
        engine.close()
    return values


def chunks_of_no_family() -> dict[str, Any]:
    """Of a model whose logits cannot be computed in parts: losses, and the engine's events."""
    why = ValueError("the logits of Some are not those of its output head")
    with mock.patch.object(build, "operations_on_logits", side_effect=why):
        engine = engine_of(stage(1), model={"loss_chunk": CHUNK})
    values = {"losses": losses(engine, 2), "events": engine.events}
    engine.close()
    return values


CHECKS = (chunked_gathers, chunked_evaluation, chunks_of_no_family)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
