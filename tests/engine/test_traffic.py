"""Bytes sent in a step over two ranks: those of every collective equal the formulas."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.estimate import traffic
from harness.estimate.inputs import Inputs
from harness.plan.memory import memory_inputs
from tests.engine.engines import (
    STAGES,
    WORLD,
    cells,
    engine_of,
    gathered,
    losses,
    pipeline,
    share_of,
    stage,
    written,
)
from tests.engine.small import MIXTURES
from tests.ranks import ranks

SMALL = 16  # bytes: norms and the like


class Collectives(TorchDispatchMode):
    """Sums the bytes of collectives over several ranks, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            groups = [a for a in args if isinstance(a, torch.ScriptObject)]
            ranks = max((dist.ProcessGroup.unbox(g).size() for g in groups[:1]), default=1)
            size = _bytes(args[1 if name in ("alltoall_base_", "_reduce_scatter_base_") else 0])
            if ranks > 1 and size > SMALL:
                self.bytes[name] += size
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    if torch.is_tensor(tensors):
        return int(tensors.nbytes)
    return sum(map(_bytes, tensors))


def sent(ds: dict[str, Any], **model: str) -> tuple[dict[str, int], Inputs]:
    """Return the second step's bytes and the plan's inputs; the first step also sends shapes."""
    engine = engine_of(ds, model=model)
    losses(engine, 1)
    with Collectives() as collectives:
        engine.train_batch(*share_of(engine), 1e-3)
    inputs = memory_inputs(engine.plan)
    assert inputs is not None
    stage_of = engine.plan.grid.coords(WORLD.rank).pipeline
    engine.close()
    return dict(collectives.bytes), inputs.of_stage(stage_of)


@pytest.mark.parametrize("number", cells(STAGES, (1, 3)))
@ranks(2)
def test_data_ranks_send_gradients_and_weights(number: int) -> None:
    seen, inputs = sent(stage(number))
    gradients, weights = traffic.gradients(inputs).total, traffic.weights(inputs).total
    reduced = "_reduce_scatter_base_" if number == 3 else "allreduce_"
    assert seen == {reduced: gradients, **({"_allgather_base_": weights} if number else {})}
    assert gradients > 0
    assert bool(weights) == bool(number)


@ranks(2)
def test_tensor_ranks_add_up_hidden_states_and_losses() -> None:
    seen, inputs = sent({**stage(1), "tensor_parallel": {"autotp_size": 2}})
    losses = 4 * 4 * inputs.tokens  # fp32 numbers over vocabulary shards; not timed
    of_micro_batch = traffic.tensor(inputs).total + losses
    assert seen == {"allreduce_": inputs.grad_accum * of_micro_batch}


@ranks(2)
def test_ranks_of_a_row_exchange_heads_and_are_data_ranks() -> None:
    whole, _ = sent(stage(1))
    seen, inputs = sent({**stage(1), "sequence_parallel_size": 2})
    heads = inputs.grad_accum * traffic.sequence(inputs).total
    assert seen == {"alltoall_base_": heads, **whole}


@ranks(2)
def test_experts_ranks_exchange_every_chosen_token_and_share_all_else() -> None:
    """The tokens that return from a rank depend on the load; only their mean is known."""
    ds = {**stage(1), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    seen, inputs = sent(ds, name=written("mixtral", MIXTURES["mixtral"]))
    counts = 8 * inputs.shape.num_experts * inputs.shape.num_layers  # tokens per expert, int64
    of_micro_batch = traffic.expert(inputs).total + counts
    exchanged = gathered(seen["alltoall_base_"])
    assert sum(exchanged) == 2 * inputs.grad_accum * of_micro_batch
    assert seen["allreduce_"] == traffic.gradients(inputs).total
    assert seen["_allgather_base_"] == traffic.weights(inputs).total


@ranks(2)
def test_stages_send_hidden_states_and_their_gradients() -> None:
    seen, inputs = sent(pipeline())
    states = inputs.grad_accum * traffic.boundary(inputs).total
    assert seen == {"send": states, "recv_": states}
