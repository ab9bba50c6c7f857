"""Initial weights: a function of seed and name, with the same distribution as transformers'."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import CONFIGS, MODEL
from tests.models.small import CPU, attention_of
from tests.tiers import rest_in_gate

FAMILIES: dict[str, dict[str, Any]] = {
    name: CONFIGS[name]
    for name in ("llama", "gpt2", "mixtral", "gpt_neox", "opt", "falcon", "phi3")
}
for name in ("qwen3", "gemma2", "olmo2"):
    FAMILIES[name] = {**MODEL, "model_type": name, "head_dim": 8, "pad_token_id": 0}
# Only the inner model has its embedding, and initializes it.
FAMILIES["xlstm"] = {**FAMILIES["qwen3"], "model_type": "xlstm", "num_heads": 4, "mode": "train"}


def empty(family: str, **changes: object) -> PreTrainedModel:
    config = {**FAMILIES[family], **changes}
    return skeleton(hf_config(config), torch.float32, attention_of(config))


def drawn(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    model = empty(family, **changes)
    materialize(model, seed, CPU)
    return model


def transformers_own(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = FAMILIES[family]
    attention = attention_of(config)
    return AutoModelForCausalLM.from_config(hf_config(config), attn_implementation=attention)


def pooled(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the elements of each parameter, pooled over all layers for better statistics."""
    values: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        kind = ".".join("N" if word.isdigit() else word for word in name.split("."))
        values.setdefault(kind, []).append(parameter.detach().flatten())
    return {kind: torch.cat(tensors) for kind, tensors in values.items()}


@pytest.mark.parametrize("family", rest_in_gate("models", FAMILIES, 2))
def test_initial_weights_follow_transformers_distribution(family: str) -> None:
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
    models = drawn(family), transformers_own(family)
    ours, theirs = (dict(model.named_buffers()) for model in models)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize(
    "family", rest_in_gate("models", [name for name in FAMILIES if name != "xlstm"], 2)
)
def test_tied_parameters_are_one_object(family: str) -> None:
    model = drawn(family, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_weight_is_a_function_of_seed_and_name() -> None:
    """A deeper model begins with the same layers."""
    shallow = dict(drawn("llama").named_parameters())
    deep = dict(drawn("llama", num_hidden_layers=5).named_parameters())
    other = dict(drawn("llama", seed=1).named_parameters())
    assert shallow.keys() < deep.keys()
    assert all(torch.equal(parameter, deep[name]) for name, parameter in shallow.items())
    assert not torch.equal(shallow["lm_head.weight"], other["lm_head.weight"])
    first, second = (shallow[f"model.layers.{n}.self_attn.q_proj.weight"] for n in (0, 1))
    assert not torch.equal(first, second)


def test_uninitialised_parameter_is_rejected_by_name() -> None:
    model = empty("llama")
    model.model.norm.extra = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"model\.norm\.extra uninitialised"):
        materialize(model, 0, CPU)


def test_weights_are_drawn_in_fp32_and_then_cast() -> None:
    exact = drawn("llama")
    model = skeleton(exact.config, torch.bfloat16)
    materialize(model, 0, CPU)
    assert torch.equal(model.lm_head.weight, exact.lm_head.weight.bfloat16())


def expected_std(config: Any, name: str, init: str) -> float:
    """Return the papers' standard deviation of a weight."""
    layers, width = config.num_hidden_layers, config.hidden_size
    usual = getattr(config, "init_std" if config.model_type == "opt" else "initializer_range")
    ends = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "out_proj", "fc2")
    writes = name.removesuffix(".weight").endswith(ends)
    if init == "small":
        return 2 / (layers * math.sqrt(width)) if writes else math.sqrt(2 / (5 * width))
    return usual / math.sqrt(2 * layers) if writes else float(usual)


@pytest.mark.parametrize("init", ["depth_scaled", "small"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_neox", "opt"])
def test_model_init_gives_the_papers_deviations(family: str, init: str) -> None:
    """Of linear layers, embeddings and fused experts; norms and biases stay as they are."""
    model, before = empty(family), dict(drawn(family).named_parameters())
    materialize(model, 0, CPU, init=init)
    redrawn = 0
    for name, parameter in model.named_parameters():
        if before[name].unique().numel() == 1 or "gate.weight" in name:
            assert torch.equal(parameter, before[name]), name
            continue
        redrawn += 1
        expected = expected_std(model.config, name, init)
        assert float(parameter.detach().std()) == pytest.approx(
            expected, rel=6 / math.sqrt(parameter.numel())
        ), name
    assert redrawn > 5
    if family == "opt":
        assert not model.model.decoder.embed_tokens.weight[1].any()
