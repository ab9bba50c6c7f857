"""Attention that can be exchanged, is summed, and separates documents as in transformers."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from harness.data.batch import Batch
from harness.models.attention import separating, takes_keywords
from harness.models.attention_sums import COVERED, QUERIES, AttentionSums, _visible, probed_queries
from harness.models.loss import forward
from harness.models.skeleton import hf_config, skeleton
from harness.models.token_losses import token_losses
from tests.engine.small import CONFIGS, EAGER, FAMILIES, MODEL, SEQ_LEN, VOCAB_SIZE
from tests.gates.models import LEARNED, ROWS
from tests.models.small import CPU, built
from tests.tiers import rest_in_gate

# Attention implemented in the family's own code, with a weight for each head, or none at all.
OWN_ATTENTION = {"bloom", "falcon", "gpt_oss", "mamba", "rwkv"}


def takes(config: dict[str, Any], attention: str) -> bool:
    model = skeleton(hf_config(config), torch.float32, attention)
    found = takes_keywords(model)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {attention}
    return found


@pytest.mark.parametrize("family", rest_in_gate("models", FAMILIES, 3))
def test_only_attention_that_can_be_exchanged_is(family: str) -> None:
    attention = "eager" if family in EAGER else "sdpa"
    assert takes(FAMILIES[family], attention) == (family not in OWN_ATTENTION)


@pytest.mark.parametrize("name", ROWS)
def test_models_that_the_gate_divides_can_be(name: str) -> None:
    assert takes(LEARNED[name], "eager" if name == "gemma2" else "sdpa")


def made(family: str, attention: str) -> Any:
    return built({**CONFIGS[family], "initializer_range": 0.3}, attention=attention).eval()


def ids(length: int = SEQ_LEN) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(0))


def summed(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the (layers, 3) sums of both samples."""
    sums = AttentionSums(model.config.num_hidden_layers, torch.ones(2, dtype=torch.bool))
    with torch.no_grad(), sums.recorded():
        model(input_ids=input_ids, use_cache=False)
    return sums.sums


@pytest.mark.parametrize("family", sorted({"llama", *FAMILIES} - OWN_ATTENTION))
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
        if family == "llama":  # without windows, every earlier token is visible
            visible = torch.arange(1, SEQ_LEN + 1)
            assert own[1] == pytest.approx(float((needed / visible).sum()), rel=1e-6)


@pytest.mark.parametrize("family", rest_in_gate("models", sorted(OWN_ATTENTION)))
def test_attention_of_another_kind_is_not_taken_for_this_one(family: str) -> None:
    sums = summed(made(family, "eager" if family in EAGER else "sdpa"), ids())
    assert not 0 < float(sums[:, 2].sum()) < torch.inf  # zero or not finite


def test_probed_queries_of_a_long_sample_and_what_they_see() -> None:
    places = probed_queries(1000)
    assert len(places) == QUERIES
    assert (int(places[0]), int(places[-1])) == (14, 999)
    assert probed_queries(5).tolist() == [0, 1, 2, 3, 4]
    how = {"cu_seq_lens_q": torch.tensor([0, 4, 6, 8]), "sliding_window": 3}  # of two rows
    seen = [_visible(None, row, torch.tensor([3]), 4, how)[0].flatten().tolist() for row in (0, 1)]
    assert seen == [[False, True, True, True], [False, False, True, True]]


def test_samples_that_do_not_count_add_nothing() -> None:
    model, both = made("llama", "sdpa"), []
    for counts, input_ids in (([True, False], ids()), ([False, True], ids().flip(0))):
        both.append(AttentionSums(3, torch.tensor(counts)))
        with torch.no_grad(), both[-1].recorded():
            model(input_ids=input_ids, use_cache=False)
    assert torch.equal(both[0].sums, both[1].sums)
    assert float(both[0].sums[0, 2]) == 4 * SEQ_LEN


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


PACKED = torch.stack([positions(SEQ_LEN), positions(5, 1, SEQ_LEN - 6)])


def test_documents_are_numbered_as_transformers_numbers_them() -> None:
    theirs = masking_utils.find_packed_sequence_indices
    expected = theirs(PACKED)
    with separating(documents=True):
        ours = masking_utils.find_packed_sequence_indices(PACKED)
    with separating(documents=False):
        assert masking_utils.find_packed_sequence_indices(PACKED) is None
    assert torch.equal(ours, expected)
    assert masking_utils.find_packed_sequence_indices is theirs


def test_single_document_rows_need_no_positions_on_device() -> None:
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    assert Batch(ids, ids, PACKED).on(CPU)[2] is PACKED
    assert Batch(ids, ids, PACKED[:1].repeat(2, 1)).on(CPU)[2] is None
    assert Batch(ids, ids, PACKED).cut(2).on(CPU)[2] is not None


class Unread(TorchDispatchMode):
    """Fails if the host reads a value of a tensor in the body."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("config", [MODEL, FAMILIES["gemma3_text"]], ids=["llama", "gemma3"])
@pytest.mark.parametrize("documents", [PACKED, None], ids=["documents", "none"])
def test_forward_reads_no_value(config: dict[str, Any], documents: torch.Tensor | None) -> None:
    model = built(config)
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    logits = model(input_ids=ids, position_ids=documents, use_cache=False).logits
    expected = token_losses(logits, ids).sum()
    with Unread():
        with pytest.raises(AssertionError, match="a value is read"):
            model(input_ids=ids, position_ids=documents, use_cache=False)
        loss, _ = forward(model, ids, ids, documents)
    assert torch.equal(loss, expected)
