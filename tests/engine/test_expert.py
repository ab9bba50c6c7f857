"""Expert parallelism on two ranks: the same weights, gradients and logits."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.dbrx import modeling_dbrx

from harness.engine.expert import Experts
from harness.layout.expert import FAMILIES
from harness.models.skeleton import hf_config
from tests.engine.engines import (
    TESTED,
    WORLD,
    cells,
    different,
    engine_of,
    folder,
    gathered,
    share_of,
    written,
)
from tests.engine.small import DBRX, EAGER, MIXTURES
from tests.ranks import ranks

MIXTRAL = "mixtral"
Gradients = dict[str, torch.Tensor]
EXPERTS, WAYS = "zero1 experts2", TESTED["expert_ways"]
CLIPPED = [*(f"zero{n} experts2" for n in (1, 2, 3)), f"{EXPERTS} bf16 fp32_sums"]


def mixture(ds: str, family: str = MIXTRAL, **model: Any) -> Any:
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
    return gradients_of(mixture("zero1", family))


def largest_distance(own: Gradients, whole: Gradients) -> float:
    """Return the largest difference of a gradient, relative to its largest element."""
    assert own.keys() == whole.keys()
    return max(
        float((own[name] - whole[name]).abs().max() / whole[name].abs().max().clamp(min=1e-30))
        for name in whole
    )


USUAL = (MIXTRAL, "deepseek_v3", WAYS[0], WAYS[2])


@pytest.mark.parametrize("case", cells([*FAMILIES, *WAYS], USUAL))
@ranks(2)
def test_gradients_are_those_of_undivided_experts(case: str) -> None:
    """In every family, and in every way."""
    family, way = (MIXTRAL, case) if case in WAYS else (case, EXPERTS)
    layout, _, recomputed = way.partition(", ")
    model = {"checkpointing": "full"} if recomputed else {}
    gradients = gradients_of(mixture(layout, family, **model))
    assert largest_distance(gradients, undivided_gradients(family)) < 1e-5


@contextlib.contextmanager
def all_to_the_first(engine: Any) -> Iterator[None]:
    """Route all tokens to the first experts, which rank 0 holds."""
    engine.module.config._experts_implementation = "eager"

    def first(forward: Any, states: Any, index: torch.Tensor, weights: Any) -> Any:
        return forward(states, torch.arange(index.shape[1]).expand_as(index), weights)

    with contextlib.ExitStack() as stack:
        for name, module in engine.module.named_modules():
            if name.endswith(".experts"):
                own = functools.partial(first, module.forward)
                stack.enter_context(mock.patch.object(module, "forward", own))
        yield


@ranks(2)
def test_a_rank_that_gets_no_token_keeps_nobody_waiting() -> None:
    with all_to_the_first(whole := mixture("zero1")):
        expected = gradients_of(whole)
    for zero in (1, 2, 3):
        with all_to_the_first(engine := mixture(f"zero{zero} experts2")):
            engine.accumulate(*share_of(engine))
            assert largest_distance(dict(engine.gradients()), expected) < 1e-5, zero
            engine.apply(1e-3)
        assert engine.expert_tokens()[:, 2:].sum() == 0  # the last experts
        engine.close()


class ListOfExperts(nn.Module):
    """A mixture as most models with their own code write it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(states).softmax(-1).max(-1)
        output = torch.zeros_like(states)
        for number in chosen.unique().tolist():
            own = chosen == number
            output[own] = self.experts[number](states[own]) * weights[own][:, None]
        return output


@pytest.mark.parametrize("block", [modeling_dbrx.DbrxFFN, ListOfExperts])
@ranks(2)
def test_ranks_may_call_different_experts_under_zero_3(block: type[nn.Module]) -> None:
    """All tokens of rank 0 are alike, and so choose one expert."""
    gradients = []
    for zero in ("zero0", "zero3"):
        with mock.patch.object(modeling_dbrx, "DbrxFFN", block):
            engine = engine_of(zero, model={"name": written("dbrx", DBRX)})
        batches, targets = share_of(engine)
        if WORLD.rank == 0:
            for batch in batches:
                batch.input_ids.fill_(1)
        for _ in range(2):  # DeepSpeed prefetches in the order of the first pass
            engine.accumulate(batches, targets)
            found = dict(engine.gradients())
            engine.apply(0.0)
        gradients.append(found)
        engine.close()
    assert largest_distance(*gradients) < 1e-5


@pytest.mark.parametrize("layout", cells(CLIPPED))
@ranks(2)
def test_deepspeed_clips_by_the_norm_of_all_experts(layout: str) -> None:
    """Each element counts once."""
    engine = mixture(layout)
    engine.accumulate(*share_of(engine))
    norm = float(engine.grad_norm())
    assert float(engine.apply(1e-3)) == pytest.approx(norm, rel=1e-6)
    assert engine.describe()["optimizer"].startswith("BF16") == ("bf16" in layout)


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
    given = {"name": str(path), "init_from": str(path)}
    for zero in (1, 3):
        engine = engine_of(f"zero{zero} experts2", model=given)
        assert different(engine.masters(), expected) == [], zero
        engine.close()


@ranks(2)
def test_expert_load_counts_every_token() -> None:
    engine = mixture(EXPERTS)
    batches, targets = share_of(engine)
    engine.eval_batch(batches)
    assert engine.expert_tokens().sum() == 0  # only training batches are counted
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        engine.accumulate(batches, targets)
    tokens = engine.expert_tokens().tolist()
    config = engine.module.config
    first, second = gathered(tokens)
    assert first == second  # over all ranks
    batch_tokens = sum(batch.input_ids.numel() for batch in batches)
    for layer in tokens:
        assert sum(layer) == WORLD.world_size * batch_tokens * config.num_experts_per_tok
    assert exchange.call_count == 5 * config.num_hidden_layers * len(batches)


def test_tokens_are_summed_over_all_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over those that hold the same experts; each once."""
    asked: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: asked.append(group))
    experts: Any = object.__new__(Experts)
    experts.group, experts._data_group, experts._tokens = "experts", "data", [torch.ones(2)]
    assert [int(experts.tokens().sum()) for _ in range(2)] == [2, 0]
    assert asked == ["data"] * 2
