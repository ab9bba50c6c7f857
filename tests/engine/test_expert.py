"""Expert parallelism on two ranks: the same weights, gradients and logits, half of the experts
each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness.layout.expert import FAMILIES
from harness.models.skeleton import hf_config
from tests.engine.engines import (
    WORLD,
    cells,
    different,
    drawn_weights,
    engine_of,
    folder,
    gathered,
    share_of,
    stage,
    written,
)
from tests.engine.small import EAGER, MIXTURES
from tests.ranks import ranks

MIXTRAL = "mixtral"
Gradients = dict[str, torch.Tensor]


def experts(zero: int = 1, **keys: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON of experts over two ranks; `keys` go into ZeRO's section."""
    ds = stage(zero)
    ds["zero_optimization"] |= keys
    return {**ds, "expert_parallel": {"enabled": True, "autoep_size": 2}}


_OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero2": (experts(2), {}),
    "zero3": (experts(3), {}),
    "zero3, recomputed": (experts(3), {"checkpointing": "full"}),
    "zero2, offloaded": (experts(2, **_OFFLOADED), {}),
    "zero3, offloaded": (experts(3, **_OFFLOADED), {}),
}
_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
OPTIMIZERS = {f"zero{zero}": experts(zero) for zero in (1, 2, 3)}
OPTIMIZERS |= {"BF16_Optimizer": {**experts(1), **_SUMS}}


def mixture(ds: dict[str, Any], family: str = MIXTRAL, **model: Any) -> Any:
    """Build an engine of a small mixture of experts."""
    attention = {"attention": "eager"} if family in EAGER else {}
    return engine_of(ds, model={"name": written(family, MIXTURES[family]), **attention, **model})


def gradients_of(engine: Any) -> Gradients:
    """Return the gradients of a batch, and close the engine."""
    engine.accumulate(*share_of(engine))
    gradients = dict(engine.gradients())
    engine.close()
    return gradients


@functools.cache
def undivided_gradients(family: str = MIXTRAL) -> Gradients:
    return gradients_of(mixture(stage(1), family))


def largest_distance(own: Gradients, whole: Gradients) -> float:
    """Return the largest difference of a gradient, relative to its largest element."""
    assert own.keys() == whole.keys()
    return max(
        float((own[name] - whole[name]).abs().max() / whole[name].abs().max().clamp(min=1e-30))
        for name in whole
    )


@pytest.mark.parametrize("family", cells(FAMILIES, (MIXTRAL, "deepseek_v3")))
@ranks(2)
def test_gradients_are_those_of_undivided_experts(family: str) -> None:
    gradients = gradients_of(mixture(experts(), family))
    assert largest_distance(gradients, undivided_gradients(family)) < 1e-5


@pytest.mark.parametrize("way", cells(WAYS, ("zero2", "zero3, recomputed")))
@ranks(2)
def test_gradients_are_those_of_undivided_experts_in_every_way(way: str) -> None:
    ds, model = WAYS[way]
    gradients = gradients_of(mixture(ds, **model))
    assert largest_distance(gradients, undivided_gradients()) < 1e-5


@contextlib.contextmanager
def all_to_the_first(engine: Any) -> Iterator[None]:
    """Route all tokens to the first experts, which rank 0 holds."""
    engine.module.config._experts_implementation = "eager"
    with contextlib.ExitStack() as stack:
        for name, module in engine.module.named_modules():
            if name.endswith(".experts"):
                stack.enter_context(mock.patch.object(module, "forward", _first(module.forward)))
        yield


def _first(forward: Any) -> Any:
    def to_the_first(states: Any, index: torch.Tensor, weights: Any) -> Any:
        return forward(states, torch.arange(index.shape[1]).expand_as(index), weights)

    return to_the_first


@ranks(2)
def test_a_rank_that_gets_no_token_keeps_nobody_waiting() -> None:
    with all_to_the_first(whole := mixture(stage(1))):
        expected = gradients_of(whole)
    for zero in (1, 2, 3):
        with all_to_the_first(engine := mixture(experts(zero))):
            engine.accumulate(*share_of(engine))
            assert largest_distance(dict(engine.gradients()), expected) < 1e-5, zero
            engine.apply(1e-3)
        assert engine.expert_tokens()[:, 2:].sum() == 0  # the last experts
        engine.close()


@pytest.mark.parametrize("optimizer", cells(OPTIMIZERS, 1))
@ranks(2)
def test_deepspeed_clips_by_the_norm_of_all_experts(optimizer: str) -> None:
    """Each element counts once."""
    engine = mixture(OPTIMIZERS[optimizer])
    engine.accumulate(*share_of(engine))
    norm = float(engine.grad_norm())
    assert float(engine.apply(1e-3)) == pytest.approx(norm, rel=1e-6)
    assert optimizer in ("BF16_Optimizer", f"zero{engine.plan.zero_stage}")
    engine.close()


@pytest.mark.parametrize("zero", [1, 2, 3])
@ranks(2)
def test_ranks_start_from_the_weights_that_one_process_draws(zero: int) -> None:
    """Each rank has half of the experts and all other parameters."""
    drawn = drawn_weights(MIXTURES[MIXTRAL])
    engine = mixture(experts(zero))
    assert different(engine.masters(), drawn) == []
    of_experts = sum(t.numel() for name, t in drawn.items() if ".experts." in name)
    rest = sum(t.numel() for t in drawn.values()) - of_experts
    parts = [(name, parameter.part) for name, parameter in engine.module.named_parameters()]
    assert sum(part.numel for _, part in parts if part.is_whole) == rest
    assert sum(part.numel for _, part in parts if not part.is_whole) == of_experts // 2
    assert all(part.shape[0] * 2 == part.whole[0] for name, part in parts if ".exp" in name)
    shards = 2 if zero == 3 else 1
    assert engine.describe()["elements_held"] == rest // shards + of_experts // 2
    engine.close()


@ranks(2)
def test_given_weights_are_read_and_divided() -> None:
    """They are in transformers' format, one tensor per expert."""
    path = folder() / "given_mixture"
    model = AutoModelForCausalLM.from_config(hf_config(MIXTURES[MIXTRAL]))
    if WORLD.rank == 0:
        model.save_pretrained(path)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    expected = {name: weight.detach() for name, weight in model.named_parameters()}
    for zero in (1, 3):
        engine = engine_of(experts(zero), model={"name": str(path), "init_from": str(path)})
        assert different(engine.masters(), expected) == [], zero
        engine.close()


@ranks(2)
def test_the_last_tokens_logits_and_an_evaluation_are_the_undivided_models() -> None:
    ids = torch.arange(5)[None] + 3
    outputs, tokens = [], []
    for ds in (stage(1), experts()):
        engine = mixture(ds)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        outputs.append((engine.next_token_logits(ids), sums))
        tokens.append(engine.expert_tokens())
        engine.close()
    (logits, sums), (divided, divided_sums) = outputs
    assert (logits - divided).abs().max() < 1e-6
    assert (sums - divided_sums).abs().max() < 1e-4  # sum of some hundred tokens, nats
    assert tokens[0] is None
    assert tokens[1].sum() == 0  # only training batches are counted


@ranks(2)
def test_every_token_is_counted() -> None:
    engine = mixture(experts())
    batches, targets = share_of(engine)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        engine.accumulate(batches, targets)
    tokens = engine.expert_tokens().tolist()
    config = engine.module.config
    engine.close()
    first, second = gathered(tokens)
    assert first == second  # over all ranks
    batch_tokens = sum(batch.input_ids.numel() for batch in batches)
    for layer in tokens:
        assert sum(layer) == WORLD.world_size * batch_tokens * config.num_experts_per_tok
    assert exchange.call_count == 5 * config.num_hidden_layers * len(batches)
