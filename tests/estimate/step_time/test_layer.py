"""Work between tokens: by kind of layer, and by kind of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.estimate.inputs import BY_REFERENCE, Inputs, LayerTrace
from harness.estimate.step_time.machine import machine_of
from harness.estimate.step_time.step import estimate_time
from harness.layout.adapters import Adapters
from harness.layout.attention_table import ATTENTIONS
from harness.layout.shape import Body, Shape, Tensor, active_parameters, flops_per_token
from tests.estimate.step_time.test_step import MACHINE, run

LSTM = (
    Tensor("norm.weight", (1024,), "norm"),
    Tensor("cell.weight_ih", (4096, 1024), "states"),
    Tensor("cell.weight_hh", (4096, 1024), "states"),
    Tensor("out_proj.weight", (1024, 1024), "mlp"),
)
MAMBA = (
    Tensor("mixer.A_log", (16,), "norm"),
    Tensor("mixer.conv1d.weight", (2048, 1, 4), "states"),
    Tensor("mixer.in_proj.weight", (3088, 1024), "states"),
    Tensor("mixer.out_proj.weight", (1024, 1024), "states"),
)


def shape_of(layer: tuple[Tensor, ...], **sizes: Any) -> Shape:
    """Return the shape of a traced model of four such layers."""
    embedding = Tensor("embed.weight", (32000, 1024), "embedding")
    names = ("num_heads", "num_kv_heads", "num_experts", "experts_per_token", "expert_size")
    common = {"model_type": "traced", "vocab_size": 32000, "hidden_size": 1024, "num_layers": 4}
    common |= {"head_dim": 1024, "intermediate_size": 4096, "max_positions": 0, "tied": True}
    common |= {"sliding_windows": (None,) * 4, **dict.fromkeys(names, 1), "num_experts": 0}
    return Shape(**{**common, **sizes}, body=Body((embedding,), "layers.", (layer,) * 4, ()))


def traced(layer: tuple[Tensor, ...], **changes: Any) -> Inputs:
    sizes = changes.pop("sizes", {})
    trace = LayerTrace((changes.pop("bytes", 1e4),) * 4, way=changes.pop("way", "traced"))
    return replace(run(**changes), shape=shape_of(layer, **sizes), trace=trace)


def test_a_recurrent_layer_has_no_attention_but_a_step_for_each_token() -> None:
    short, long = (
        estimate_time(traced(LSTM, micro_batch=1, seq_len=length), MACHINE)
        for length in (1024, 8192)
    )
    assert long.terms["attention"] == 0
    assert long.bound == "serial"
    assert long.terms["serial"] == pytest.approx(8 * short.terms["serial"])
    tokens = 8192 * long.inputs.grad_accum
    assert long.terms["serial"] / tokens >= 4 * 2 * 5e-6  # layers, passes, a kernel
    many = estimate_time(traced(LSTM, micro_batch=16, seq_len=8192), MACHINE)
    assert many.tokens_per_s_per_gpu > 10 * long.tokens_per_s_per_gpu  # samples go together
    assert long.evidence == "guessed"
    shape = long.inputs.shape
    assert flops_per_token(shape, 8192) == 6 * active_parameters(shape)


def test_a_state_costs_no_more_than_its_kernels_move() -> None:
    """Reference code keeps every state that a scan goes through; its kernel does not."""
    reference, little = (
        estimate_time(traced(MAMBA, bytes=size, way=BY_REFERENCE), MACHINE) for size in (1e9, 1e3)
    )
    assert reference.terms["attention"] == reference.terms["serial"] == 0
    assert 1 < reference.terms["elements"] / little.terms["elements"] < 100
    assert reference.evidence == "guessed"


def test_tokens_are_multiplied_by_the_experts_of_a_traced_layer_that_they_chose() -> None:
    experts = (Tensor("mlp.experts.up", (64, 4096, 1024), "mlp"),)
    two, all_ = (
        estimate_time(traced(experts, sizes={"experts_per_token": k}), MACHINE) for k in (2, 64)
    )
    assert active_parameters(two.inputs.shape) == 4 * 2 * 4096 * 1024 + 32000 * 1024
    assert 4 < all_.terms["products"] / two.terms["products"] < 32


def test_attention_of_a_latent_vector_is_as_wide_as_its_heads() -> None:
    latent = (
        Tensor("attn.q_b_proj.weight", (16 * 192, 512), "attention"),
        Tensor("attn.kv_b_proj.weight", (16 * 256, 512), "attention"),
        Tensor("attn.o_proj.weight", (1024, 16 * 128), "attention"),
    )
    shape = shape_of(latent)
    scores = flops_per_token(shape, 4096) - 6 * active_parameters(shape)
    assert scores == 4 * 12 * 16 * (192 + 128) / 2 * 4096


@pytest.mark.parametrize("attention", ["longformer", "performer", "reformer"])
def test_linear_attention_grows_with_the_length_and_exact_attention_with_its_square(
    attention: str,
) -> None:
    def seconds(attention: str, length: int) -> float:
        sizes = tuple(ATTENTIONS[attention].sizes.items())
        inputs = run(micro_batch=1, seq_len=length, attention=attention, attention_sizes=sizes)
        return estimate_time(inputs, MACHINE).terms["attention"]

    assert seconds(attention, 65536) == pytest.approx(2 * seconds(attention, 32768))
    assert seconds("sdpa", 65536) == pytest.approx(4 * seconds("sdpa", 32768))


@pytest.mark.parametrize("gpu", ["v100-32", "a100-80", "h100-80", "h20", "l40s", "mi300x"])
def test_utilisation_is_never_above_1(gpu: str) -> None:
    machine = machine_of(gpu, 8, "fp16" if gpu == "v100-32" else "bf16")
    for attention, row in ATTENTIONS.items():
        for length in (2048, 32768, 1 << 20):
            for adapters in (None, Adapters(16)):
                inputs = run(micro_batch=1, seq_len=length, attention=attention, adapters=adapters)
                sizes = tuple(row.sizes.items())
                step = estimate_time(replace(inputs, attention_sizes=sizes), machine)
                share = step.mfu
                if attention == "flash_attention_3":
                    # So fast that what MFU counts of masked scores, half of attention, shows.
                    count = adapters.flops_per_token if adapters else flops_per_token
                    counted, linear = (count(inputs.shape, seen) for seen in (length, 0))
                    share *= (counted + linear) / 2 / counted
                assert 0 < share < 1, (attention, length)


def test_frozen_weights_have_no_gradient_in_utilisation() -> None:
    step = estimate_time(run(adapters=Adapters(16)), MACHINE)
    shape, adapters = step.inputs.shape, step.inputs.adapters
    assert adapters is not None
    added = sum(tensor.numel for tensor in adapters.tensors(shape))
    attention = flops_per_token(shape, 2048) - 6 * active_parameters(shape)
    flops = 4 * active_parameters(shape) + 6 * added + attention
    assert step.mfu == pytest.approx(flops * step.tokens_per_s_per_gpu / MACHINE.peak_flops)
    assert step.mfu < estimate_time(run(), MACHINE).mfu * 1.1


def test_documents_are_seen_where_a_kernel_is_told_of_them() -> None:
    """Beside a mask every score is computed."""
    terms = {}
    for attention in ("sdpa", "varlen", "longformer"):
        sizes = tuple(ATTENTIONS[attention].sizes.items())
        whole = run(attention=attention, attention_sizes=sizes, document_mask=True)
        for seen in (None, whole.seq_len / 8, whole.seq_len):
            inputs = replace(whole, seen_tokens=seen)
            terms[attention, seen] = estimate_time(inputs, MACHINE).terms["attention"]
        short, long = terms[attention, whole.seq_len / 8], terms[attention, whole.seq_len]
        assert long == terms[attention, None]
        if attention == "varlen":
            assert short == pytest.approx(long / 4)
        else:
            assert short <= long
    assert terms["sdpa", None] == terms["sdpa", whole.seq_len / 8]
