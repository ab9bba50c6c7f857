"""The numbers of pages against the formulas of their sources, calculated here."""

import itertools
from dataclasses import replace
from math import log

import pytest
import torch

from harness.errors import ConfigError
from harness.estimate.layer_bytes import layer_activations
from harness.estimate.step_time.layer import attention_flops, layer_passes
from harness.estimate.step_time.machine import machine_of
from tools.find_lr import judged
from tools.studio_app import plans
from tools.studio_pages import attention, batch, collectives, float8, kernels, rates


def test_attention_costs_what_its_papers_say() -> None:
    """Llama-3-8B: 32 heads of 128, 8 of keys; an approximate kind in its default sizes."""
    base, length = attention._base("llama-3-8b"), 32768
    seen = {
        "sdpa": length / 2,
        "eager": length,
        "longformer": 256 + 4,
        "strided": 128 + length / 2 / 128,
        "linformer": 128 + length / 2 * 32 / 256,
        "performer": 2 * 256,
        "reformer": 2 * 64 + 1,
    }
    assert {*seen} == {*attention._KINDS}
    for kind, keys in seen.items():
        inputs = attention.of_kind(base, kind, length)
        assert attention_flops(inputs, 0) == 4 * length * keys * 4096, kind
        kept = layer_activations(inputs, 0).attention / length
        softmax = 4 * 32 * (kind == "sdpa")  # its log-sum-exp
        exact = 4 * 2 * 4096 + 6 * 32 * length if kind == "eager" else 4 * (4096 + 1024) + softmax
        assert kept == exact, kind


def test_pictured_attention_sees_what_its_kind_admits() -> None:
    tokens = torch.arange(32)
    apart = tokens[:, None] - tokens
    for kind in attention._KINDS:
        weights = attention.weights_of(kind)
        torch.testing.assert_close(weights.sum(1), torch.ones(32))
        assert not weights[apart < 0].any(), "nothing sees the future"
    seen = attention.weights_of("longformer") > 0
    assert torch.equal(seen, (apart >= 0) & ((apart < 8) | (tokens == 0)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_collectives_deliver_what_they_promise(ranks: int) -> None:
    """And send the bytes of the ring and the tree."""
    everyone = range(ranks)
    results = {
        "all-reduce, ring": lambda r, c: {(n, c) for n in everyone},
        "all-reduce, tree": lambda r, c: {(n, c) for n in everyone},
        "reduce-scatter": lambda r, c: {(n, c) for n in everyone} if r == c else None,
        "all-gather": lambda r, c: {(c, c)},
        "all-to-all": lambda r, c: {(c, r)},
    }
    once = (ranks - 1) / ranks
    sent = dict.fromkeys(results, once) | {"all-reduce, ring": 2 * once}
    sent["all-reduce, tree"] = max(1, (ranks - 1).bit_length())
    for name, result in results.items():
        rounds, held = collectives.COLLECTIVES[name].rounds(ranks), collectives.begun(name, ranks)
        for messages in rounds:
            held = collectives.after(held, messages)
        for rank in everyone:
            for cell in everyone:
                expected = result(rank, cell)
                assert expected is None or held[rank][cell] == expected, name
        assert collectives.sent(rounds, ranks) / ranks == sent[name], name


def test_noise_scale_of_known_noise_is_found() -> None:
    """50 elements of 1, each with a variance of 3 for a token; 16 tokens in a gradient."""
    draws = torch.Generator().manual_seed(0)
    found = [
        batch.estimated(1 + (3 / 16) ** 0.5 * torch.randn(4, 50, generator=draws), 16)
        for _ in range(2000)
    ]
    norm, variance = (sum(column) / len(found) for column in zip(*found, strict=True))
    assert (norm, variance) == pytest.approx((50, 150), rel=0.01)
    steady = [batch.Measured(0, norm, variance)] * 3
    assert batch.noise_scales(steady) == pytest.approx([variance / norm] * 3)
    assert batch.price(3, 3) == (2, 2)
    assert batch.price(512, 1024) == (3, 1.5)


def test_range_test_of_the_page_is_that_of_the_tool() -> None:
    found = rates.range_test("sgd", 1e-3, 1.0, 50, 1)
    assert found.losses[0] == pytest.approx(log(256), abs=0.1)
    assert found.rates == pytest.approx([10 ** (-3 + 3 * n / 49) for n in range(len(found.rates))])
    assert found == judged(found.rates, found.losses)
    with pytest.raises(ConfigError, match="which may be noise"):  # a flat curve suggests nothing
        rates.range_test("sgd", 1e-6, 1e-3, 100, 4)


def test_roofline_of_a_layer_is_the_plan_of_its_time() -> None:
    inputs = plans.estimate_of(plans.planned({"model": "llama-3-8b", "seq_len": 4096})).inputs
    machine = machine_of("a100-80", 8, "bf16")
    each = kernels.kernels(inputs, machine)
    forward = layer_passes(inputs, 0, machine).forward
    assert sum(kernel.seconds for kernel in each) == pytest.approx(
        forward.products + forward.attention + forward.elements
    )
    gate = next(kernel for kernel in each if kernel.name.startswith("gate"))
    m, n, k = 4096, 14336, 4096
    assert gate.flops == 2 * m * n * k
    assert gate.intensity == gate.flops / (2 * (m * n + m * k + n * k))
    assert kernels.ridge(machine) == machine.peak_flops / machine.memory_rate
    for gpu, length in itertools.product(("h100-sxm", "l4"), (256, 4096)):
        other, short = machine_of(gpu, 8, "bf16"), replace(inputs, seq_len=length)
        for kernel in kernels.kernels(short, other):  # none is above the roof
            roof = min(other.peak_flops, kernel.intensity * other.memory_rate)
            assert kernel.flops / kernel.seconds <= 1.001 * roof, (gpu, length, kernel.name)
    assert [kernel.bound(machine) for kernel in (gate, each[-1])] == ["computation", "memory"]
    of_experts = plans.estimate_of(plans.planned({"model": "mixtral-8x7b"})).inputs
    with pytest.raises(ValueError, match="dense"):
        kernels.kernels(of_experts, machine)


def test_float8_rounds_as_its_formats_do() -> None:
    """e4m3: 448 is the largest number, 2^-9 the smallest, 2^-4 the largest relative error."""
    numbers = torch.tensor([[448.0, 17.0, 2.0**-9, 2.0**-11]])
    assert float8.rounded(numbers, "e4m3", False).tolist() == [[448.0, 16.0, 2.0**-9, 0.0]]
    draws = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    draws = draws.sign() * (draws.abs() + 0.1)  # none is near 0
    for name, worst in (("e4m3", 2.0**-4), ("e5m2", 2.0**-3), ("bf16", 2.0**-8)):
        off = ((float8.rounded(draws, name, True) - draws) / draws).abs().max()
        assert worst / 2 < off <= worst * 1.001, name
    tensorwise, rowwise = (float8.error(f"e4m3, {of}", 1e6) for of in float8.SCALES)
    assert tensorwise > 10 * rowwise
    assert float8.error(f"e4m3, {float8.SCALES[0]}", 1) == pytest.approx(rowwise, rel=0.1)
