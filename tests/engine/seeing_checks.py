"""Checks of what a run measures beside its loss, on two ranks; test_seeing.py compares them."""

from __future__ import annotations

from typing import Any

import torch

from harness.data.batch import Batch
from harness.data.needles import Needles
from harness.run.attention_probe import attention_sums
from harness.run.weights import WeightChange
from tests.engine.rank import engine_of, run_checks, share_of, stage
from tests.engine.small import SEQ_LEN

BUCKETS = 5  # which do not divide the length
DOCUMENTS = torch.cat([torch.arange(7), torch.arange(SEQ_LEN - 7)]).expand(2, -1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"ds": stage(0)},
    "zero1": {"ds": stage(1)},
    "zero3": {"ds": stage(3)},
    "pipeline": {"ds": {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}},
    "tensor": {"ds": {**stage(1), "tensor_parallel": {"autotp_size": 2}}},
    "documents": {"ds": stage(1), "documents": True},
    "varlen": {"ds": stage(3), "documents": True, "model": {"attention": "varlen"}},
    "eager": {"ds": stage(1), "model": {"attention": "eager"}},
    "chunked": {"ds": stage(3), "model": {"loss_chunk": 24}},
}


def rows(batches: list[Batch], documents: bool) -> list[Batch]:
    """The micro-batches, each row as two documents; no target at the seam."""
    if not documents:
        return batches
    result = []
    for batch in batches:
        labels = batch.labels.clone()
        labels[:, 6] = -100
        result.append(Batch(batch.input_ids, labels, DOCUMENTS.clone()))
    return result


def needles(batches: list[Batch]) -> list[Batch]:
    """Each micro-batch as one row of its two, of which the last five tokens are targets; whose
    first id is odd is at the second depth.
    """
    result = []
    for batch in batches:
        ids, labels = batch.input_ids.reshape(1, -1), batch.labels.reshape(1, -1).clone()
        labels[:, :-5] = -100
        result.append(Needles(ids, labels, None, depths=ids[:, 0] % 2))
    return result


def measured(ds: Any, documents: bool = False, **sections: Any) -> dict[str, Any]:
    engine = engine_of(ds, **sections)
    own, targets = share_of(engine)
    batches = rows(own, documents)
    by_position = torch.zeros(BUCKETS, 2, dtype=torch.float64)
    sums = torch.cat([engine.eval_batch(batches, by_position), by_position.flatten()])
    sums = engine.sum_over_ranks(sums).tolist()
    longer = torch.zeros(2, 2, dtype=torch.float64)
    engine.eval_batch(needles(own), longer)
    longer = engine.sum_over_ranks(longer).tolist()
    first = torch.tensor([True, False])  # of two samples in each micro-batch
    attention = attention_sums(engine, [(batch, first) for batch in batches])
    before = dict(engine.masters())
    change = WeightChange(engine)
    change.step_begins(1)
    engine.train_batch(batches, targets, 1e-2)
    seen = {name: float(value) for name, value in change.taken(1).items()}
    after = dict(engine.masters())
    assert change.taken(2) == {}
    engine.close()
    return {
        "attention": attention.tolist(),
        "sums": sums,
        "longer": longer,
        "weights": seen,
        "param_norm": norm(after),
        "update_ratio": norm({n: after[n] - before[n] for n in after}) / norm(before),
    }


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


def seen_in_all_layouts() -> dict[str, Any]:
    return {name: measured(**layout) for name, layout in LAYOUTS.items()}


def main() -> None:
    run_checks((seen_in_all_layouts,))


if __name__ == "__main__":
    main()
