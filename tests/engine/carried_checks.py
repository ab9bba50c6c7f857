"""Checks of states that are carried from window to window, on two ranks; test_carried.py compares
them with loops over tokens and rows.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.data.batch import Batch
from harness.engine.api import Engine
from tests.engine.rank import OUT, engine_of, fp16, run_checks, save, stage
from tests.engine.small import SEQ_LEN
from tests.engine.streams import ROWS, STARTS, STEPS, WINDOWS, stream

_CPU = {"device": "cpu", "pin_memory": False}
OFFLOAD = {"zero_optimization": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU}}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero{number}": {"ds": stage(number)} for number in range(3)},
    "zero3_offload": {"ds": OFFLOAD},
    "full_zero3": {"ds": stage(3), "checkpointing": "full"},
}
LR = 0.05
SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}


def carrying(ds: Any, kind: str = "lstm", **model: Any) -> Any:
    model |= {"name": str(OUT / kind / "config.json"), "attention": "eager"}
    return engine_of(ds, model=model, train={"carry_state": True}, optim=SGD)


def share(engine: Engine, step: int, starts: tuple[int, ...] = STARTS) -> tuple[list[Batch], int]:
    """This rank's micro-batches of a step, and the targets of all."""
    plan = engine.plan
    mine = stream(starts).micro_batches(
        plan.curriculum.at(step * ROWS),
        plan.micro_batch,
        plan.share.data_rank,
        plan.share.data_ranks,
    )
    return mine, ROWS * SEQ_LEN


def loss(engine: Engine, step: int) -> float:
    result = engine.train_batch(*share(engine, step), LR)
    return float(engine.sum_over_ranks(result.loss_share.clone()))


def trained() -> dict[str, Any]:
    """Losses by model and layout, with an evaluation between two steps; gradients of the last."""
    results: dict[str, Any] = {}
    for kind in ("lstm", "gru", "mamba2"):
        for name in LAYOUTS if kind == "lstm" else ("full_zero3",):
            engine = carrying(kind=kind, **LAYOUTS[name])
            losses = []
            for step in range(STEPS):
                if step == 1:
                    engine.eval_batch(share(engine, 0)[0])
                losses.append(loss(engine, step))
            engine.accumulate(*share(engine, STEPS))
            save(f"gradients-{kind}-{name}", engine.gradients())
            results[f"{kind}-{name}"] = losses
            engine.close()
    return results


def one_long_window() -> list[float]:
    """The mean loss of rows of one document as windows with a carried state, by weights that do not
    change, and as single windows.
    """
    engine, losses = carrying(stage(3)), []
    whole = [share(engine, step, (0,))[0] for step in range(WINDOWS)]
    for batches in whole:
        result = engine.train_batch(batches, ROWS * SEQ_LEN, 0.0)
        losses.append(float(engine.sum_over_ranks(result.loss_share.clone())))
    long = [
        Batch(
            torch.cat([batch.input_ids for batch in of_row], 1),
            torch.cat([batch.labels for batch in of_row], 1),
            None,
        )
        for of_row in zip(*whole, strict=True)
    ]
    sums = engine.sum_over_ranks(engine.eval_batch(long))
    engine.close()
    return [sum(losses) / len(losses), float(sums[0] / sums[1])]


def overflowed() -> list[Any]:
    """For each of fp16's first steps: if it was applied, if the states behind it are finite, and
    the windows that they lie behind.
    """
    engine = carrying(fp16())
    seen = []
    for step in range(2):
        loss(engine, step)
        states = [f for f in engine.fragments() if f.name.startswith("carried")]
        tensors = [tensor for f in states for tensor in f.tensors.values()]
        is_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        windows = [t.tolist() for t in tensors if t.dtype == torch.int64]
        seen.append([engine.step_applied, is_finite, windows])
    engine.close()
    return seen


CHECKS = (trained, one_long_window, overflowed)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
