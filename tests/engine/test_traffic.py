"""Bytes sent in a step over two ranks: those of every collective equal the formulas."""

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.estimate import traffic
from harness.estimate.inputs import Inputs
from harness.models.units import decoder_layers
from harness.plan.memory import memory_inputs
from tests.engine.engines import (
    STAGES,
    WORLD,
    cells,
    engine_of,
    gathered,
    losses,
    share_of,
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
            if name in ("send", "recv_") and not args[0][0].is_floating_point():
                size = 0  # shapes
            if ranks > 1 and size > SMALL:
                self.bytes[name] += size
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    if torch.is_tensor(tensors):
        return int(tensors.nbytes)
    return sum(map(_bytes, tensors))


def sent(layout: str, **model: str) -> tuple[dict[str, int], Inputs]:
    """Return the second step's bytes and the plan's inputs; the first step also sends shapes."""
    engine = engine_of(layout, model=model)
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
    seen, inputs = sent(f"zero{number}")
    gradients, weights = traffic.gradients(inputs).total, traffic.weights(inputs).total
    reduced = "_reduce_scatter_base_" if number == 3 else "allreduce_"
    assert seen == {reduced: gradients, **({"_allgather_base_": weights} if number else {})}
    assert gradients > 0
    assert bool(weights) == bool(number)


@pytest.mark.parametrize("layout", ["zero1 tensor2", "zero1 whole_tensor2"])
@ranks(2)
def test_tensor_ranks_add_up_hidden_states_and_losses(layout: str) -> None:
    seen, inputs = sent(layout)
    losses = 4 * 4 * inputs.tokens  # fp32 numbers over vocabulary shards; not timed
    norms = 2 * inputs.shape.num_layers * inputs.shape.hidden_size * 4 * inputs.divides_residuals
    moved = {**dict.fromkeys(("_allgather_base_", "_reduce_scatter_base_"), 0), **seen}
    moved["allreduce_"] -= inputs.grad_accum * (losses + norms)
    halves = 2 * moved.pop("allreduce_") + sum(moved.values())
    assert halves == 2 * inputs.grad_accum * traffic.tensor(inputs).total
    assert inputs.divides_residuals == bool(moved["_reduce_scatter_base_"])


@ranks(2)
def test_ranks_of_a_row_exchange_heads_and_are_data_ranks() -> None:
    whole, _ = sent("zero1")
    seen, inputs = sent("zero1 sequence2")
    heads = inputs.grad_accum * traffic.sequence(inputs).total
    assert seen == {"alltoall_base_": heads, **whole}


@ranks(2)
def test_expert_ranks_exchange_each_chosen_token() -> None:
    """The tokens that return from a rank depend on the load; only their mean is known."""
    seen, inputs = sent("zero1 experts2", name=written("mixtral", MIXTURES["mixtral"]))
    counts = 8 * inputs.shape.num_experts * inputs.shape.num_layers  # tokens per expert, int64
    of_micro_batch = traffic.expert(inputs).total + counts
    exchanged = gathered(seen["alltoall_base_"])
    assert sum(exchanged) == 2 * inputs.grad_accum * of_micro_batch
    assert seen["allreduce_"] == traffic.gradients(inputs).total
    assert seen["_allgather_base_"] == traffic.weights(inputs).total


@ranks(2)
def test_stages_send_hidden_states_and_their_gradients() -> None:
    seen, inputs = sent("zero1 pipeline2")
    states = inputs.grad_accum * traffic.boundary(inputs).total
    assert seen == {"send": states, "recv_": states}


@pytest.mark.gate("engine")
@ranks(4)
def test_pipeline_traffic_per_micro_batch_is_as_documented() -> None:
    """As in docs/layouts.md: a part of the hidden states to the other stage; within a stage, the
    states scattered four times and gathered six times per layer, once more at either end of a stage
    and of its layers, and summed at the model's ends.
    """
    engine = engine_of("zero1 pipeline2 tensor2")
    batches, targets = share_of(engine)
    engine.accumulate(batches, targets)  # in which stages agree on shapes
    with Collectives() as collectives:
        engine.accumulate(batches, targets)
    is_last = engine.describe()["pipeline_stage"] == 1
    _, layers = decoder_layers(engine.stage.model)
    own_layers = sum(bool([*layer.parameters()]) for layer in layers)
    tokens = batches[0].input_ids.numel()
    hidden_size = engine.module.config.hidden_size
    states, norms = tokens * hidden_size * 4, 2 * own_layers * hidden_size * 4
    of_micro_batch = {
        "send": states // 2,
        "recv_": states // 2,
        "allreduce_": states + (tokens * 4 * 4 if is_last else 0) + norms,  # losses
        "_reduce_scatter_base_": 4 * own_layers * states,
        "_allgather_base_": (6 * own_layers + 2 + (1 if is_last else 2)) * states,
    }
    sent = {kind: len(batches) * size for kind, size in of_micro_batch.items()}
    assert dict(collectives.bytes) == sent
