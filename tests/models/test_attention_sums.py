"""Entropy and coverage of attention equal those of the weights that families themselves return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.models.attention_sums import COVERED, QUERIES, AttentionSums, probed_queries
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import EAGER, FAMILIES, MODEL, SEQ_LEN, VOCAB_SIZE
from tests.tiers import rest_in_gate

# Attention written out in the family's own code, with sinks, or none at all.
UNSEEN = {"bloom", "falcon", "gpt_oss", "mamba", "rwkv"}
COMPARED = sorted({"llama", *FAMILIES} - UNSEEN)
CONFIGS = {"llama": MODEL, **FAMILIES}


def made(family: str, attention: str) -> Any:
    config = {**CONFIGS[family], "initializer_range": 0.3}
    model = skeleton(hf_config(config), torch.float32, attention)
    materialize(model, 0, torch.device("cpu"))
    return model.eval()


def ids(length: int = SEQ_LEN) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(0))


def summed(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """(layers, 3) of both samples."""
    sums = AttentionSums(model.config.num_hidden_layers, torch.ones(2, dtype=torch.bool))
    with torch.no_grad(), sums.recorded():
        model(input_ids=input_ids, use_cache=False)
    return sums.sums


@pytest.mark.parametrize("family", COMPARED)
def test_sums_are_those_of_the_weights_that_a_family_returns(family: str) -> None:
    sums = summed(made(family, "sdpa"), ids())
    with torch.no_grad():
        outputs = made(family, "eager")(input_ids=ids(), output_attentions=True, use_cache=False)
    assert len(outputs.attentions) == len(sums)
    for own, weights in zip(sums, outputs.attentions, strict=True):
        exact = weights.double()  # (samples, heads, queries, tokens)
        assert own[2] == exact[..., 0].numel()
        assert own[0] == pytest.approx(float(torch.special.entr(exact).sum()), rel=1e-4)
        needed = (exact.sort(-1, descending=True).values.cumsum(-1) < COVERED).sum(-1) + 1
        assert own[1] <= float((needed / (exact > 0).sum(-1)).sum()) * 1.0001
        if family == "llama":  # without windows every earlier token is visible
            visible = torch.arange(1, SEQ_LEN + 1)
            assert own[1] == pytest.approx(float((needed / visible).sum()), rel=1e-6)


@pytest.mark.parametrize("family", rest_in_gate("models", sorted(UNSEEN & set(FAMILIES))))
def test_attention_of_another_kind_is_not_taken_for_this_one(family: str) -> None:
    sums = summed(made(family, "eager" if family in EAGER else "sdpa"), ids())
    assert not 0 < float(sums[:, 2].sum()) < torch.inf  # none, or no number


def test_a_long_sample_is_looked_at_in_places() -> None:
    places = probed_queries(1000)
    assert len(places) == QUERIES
    assert (int(places[0]), int(places[-1])) == (14, 999)
    assert probed_queries(5).tolist() == [0, 1, 2, 3, 4]


def test_samples_that_do_not_count_add_nothing() -> None:
    model = made("llama", "sdpa")
    of_first = AttentionSums(3, torch.tensor([True, False]))
    with torch.no_grad(), of_first.recorded():
        model(input_ids=ids(), use_cache=False)
    swapped = AttentionSums(3, torch.tensor([False, True]))
    with torch.no_grad(), swapped.recorded():
        model(input_ids=ids().flip(0), use_cache=False)
    assert torch.equal(of_first.sums, swapped.sums)
    assert float(of_first.sums[0, 2]) == 4 * SEQ_LEN
