"""Initial weights: a function of seed and name, with the same distribution as transformers'."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.tiers import rest_in_gate

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": SMALL,
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "qwen3": SMALL,
    "mixtral": {**SMALL, "num_local_experts": 4},
    "gemma2": SMALL,
    "gpt_neox": SMALL,
    "opt": {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "olmo2": SMALL,
    "falcon": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "phi3": SMALL,
    # Only the inner model has its embedding, and initializes it.
    "xlstm": {**SMALL, "num_heads": 4, "mode": "train"},
}
ATTENTION = {"gemma2": "eager", "xlstm": "eager"}


def empty(family: str, **changes: object) -> PreTrainedModel:
    config = hf_config({"model_type": family, **FAMILIES[family], **changes})
    return skeleton(config, torch.float32, ATTENTION.get(family, "sdpa"))


def drawn(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    model = empty(family, **changes)
    materialize(model, seed, CPU)
    return model


def transformers_own(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = hf_config({"model_type": family, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION.get(family, "sdpa")
    )


def pooled(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the elements of each parameter, pooled over all layers for better statistics."""
    values: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        kind = ".".join("N" if word.isdigit() else word for word in name.split("."))
        values.setdefault(kind, []).append(parameter.detach().flatten())
    return {kind: torch.cat(tensors) for kind, tensors in values.items()}


@pytest.mark.parametrize("family", rest_in_gate("models", FAMILIES, 2))
def test_weights_have_the_distribution_that_transformers_gives_them(family: str) -> None:
    ours, theirs = pooled(drawn(family)), pooled(transformers_own(family))
    assert ours.keys() == theirs.keys()
    for kind, expected in theirs.items():
        values, count = ours[kind], expected.numel()
        if expected.unique().numel() == 1:
            assert torch.equal(values, expected), kind
            continue
        # Six standard errors of the difference of two samples.
        spread = float(expected.std())
        assert abs(float(values.std()) / spread - 1) < 6 / math.sqrt(count), kind
        assert abs(float(values.mean() - expected.mean())) < 6 * spread * math.sqrt(2 / count), kind


@pytest.mark.parametrize("family", rest_in_gate("models", FAMILIES, 2))
def test_buffers_are_those_that_transformers_computes(family: str) -> None:
    ours, theirs = (
        dict(drawn(family).named_buffers()),
        dict(transformers_own(family).named_buffers()),
    )
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize(
    "family", rest_in_gate("models", [name for name in FAMILIES if name != "xlstm"], 2)
)
def test_tied_parameters_are_one_object(family: str) -> None:
    model = drawn(family, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_gpt2_rescales_the_projections_into_the_residual_stream() -> None:
    model = drawn("gpt2")
    attention = model.transformer.h[0].attn
    ratio = attention.c_proj.weight.std() / attention.c_attn.weight.std()
    assert ratio.item() == pytest.approx(1 / math.sqrt(2 * 3), rel=0.06)


def test_a_weight_does_not_depend_on_the_rest_of_the_model() -> None:
    """A function of (seed, name): a deeper model begins with the same layers."""
    shallow = dict(drawn("llama").named_parameters())
    deep = dict(drawn("llama", num_hidden_layers=5).named_parameters())
    assert shallow.keys() < deep.keys()
    assert all(torch.equal(parameter, deep[name]) for name, parameter in shallow.items())


def test_another_seed_gives_other_weights() -> None:
    one, other = drawn("llama", seed=0), drawn("llama", seed=1)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_no_two_modules_get_the_same_weights() -> None:
    layers = drawn("llama").model.layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)


def test_a_parameter_that_the_class_leaves_uninitialised_is_refused_by_name() -> None:
    model = empty("llama")
    model.model.norm.extra = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"model\.norm\.extra uninitialised"):
        materialize(model, 0, CPU)


def test_weights_are_drawn_in_fp32_and_then_cast() -> None:
    exact = drawn("llama")
    model = skeleton(exact.config, torch.bfloat16)
    materialize(model, 0, CPU)
    assert torch.equal(model.lm_head.weight, exact.lm_head.weight.bfloat16())
