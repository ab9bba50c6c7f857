"""Efficient attention: causal, within documents, and equal to exact attention at full size."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.layout.attention_table import ATTENTIONS
from harness.models.attention_sums import AttentionSums
from harness.models.efficient_attention.kinds import KINDS, function_name
from harness.models.efficient_attention.patterns import normal
from tests.tables import beside

TABLES = beside(__file__, "efficient_attention.toml")

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
SMALL, EXACT = TABLES["small"], TABLES["exact"]
MODULE = SimpleNamespace(layer_idx=1)


def states(
    tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 1
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def attend(kind: str, sizes: dict[str, int], *qkv: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Return (batch, tokens, heads, head_dim) from (batch, heads, tokens, head_dim) each."""
    function = ALL_ATTENTION_FUNCTIONS[function_name(kind, sizes, keywords.pop("seed", 0))]
    output: torch.Tensor = function(MODULE, *qkv, None, **keywords)[0]
    return output


def exact(*qkv: torch.Tensor) -> torch.Tensor:
    output = functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


def gradients(output: torch.Tensor, qkv: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad(output, qkv, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_computed_on_the_device_of_the_states(kind: str) -> None:
    output = attend(kind, SMALL[kind], *(state.to("meta") for state in states(200)))
    assert output.device.type == "meta"


def test_every_attention_kind_has_a_row_in_the_docs() -> None:
    assert {name for name, row in ATTENTIONS.items() if not row.is_exact} == {*KINDS}
    assert {*SMALL} == {*KINDS}


@pytest.mark.parametrize("kind", EXACT)
def test_with_its_largest_sizes_it_is_exact_attention(kind: str) -> None:
    qkv = states(200, batch=2)
    output, expected = attend(kind, EXACT[kind], *qkv, scaling=0.125), exact(qkv[0] / 2, *qkv[1:])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for own, other in zip(gradients(output, qkv), gradients(expected, qkv), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_position_reads_the_future(kind: str) -> None:
    """Neither a gradient nor a single bit of an output depends on later tokens."""
    qkv = states(200)
    output = attend(kind, SMALL[kind], *qkv)
    for place in (0, 23, 24, 63, 64, 127, 128, 150):
        for gradient in torch.autograd.grad(output[:, place].sum(), qkv, retain_graph=True):
            assert not gradient[:, :, place + 1 :].any()
            assert gradient[:, :, : place + 1].any() or place == 0
        changed = [
            torch.cat([state[:, :, : place + 1], 5 * other[:, :, place + 1 :]], 2)
            for state, other in zip(qkv, states(200, seed=1), strict=True)
        ]
        again = attend(kind, SMALL[kind], *changed)
        assert torch.equal(again[:, : place + 1], output[:, : place + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_computed_as_if_it_were_alone(kind: str) -> None:
    """Its batch and its neighbours do not matter either."""
    qkv = states(100, batch=2)
    bounds = [0, 37, 100, 101, 200]
    output = attend(kind, SMALL[kind], *qkv, cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32))
    assert output.shape == (2, 100, HEADS, WIDTH)
    for start, stop in itertools.pairwise(bounds):
        row, first = divmod(start, 100)
        alone = [s[row : row + 1, :, first : first + stop - start] for s in qkv]
        expected = attend(kind, SMALL[kind], *alone)[0]
        torch.testing.assert_close(output.flatten(0, 1)[start:stop], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """In fp64 if the kind computes in it; more tokens than two chunks of performer's, 128 each."""
    qkv = states(300) if kind == "performer" else states(150, torch.float64)
    output = attend(kind, SMALL[kind], *qkv)
    torch.manual_seed(0)
    due = torch.randn_like(output)
    own = torch.autograd.grad(output, qkv, due)
    step, tolerance = (1e-2, 1e-2) if kind == "performer" else (1e-5, 1e-5)
    for number, gradient in enumerate(own):
        direction = torch.randn_like(gradient)
        sides = []
        for sign in (1, -1):
            moved = [s.detach() for s in qkv]
            moved[number] = moved[number] + sign * step * direction
            sides.append(float((attend(kind, SMALL[kind], *moved).double() * due).sum()))
        expected = (sides[0] - sides[1]) / (2 * step)
        along = float((gradient * direction).sum())
        assert along == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_the_window_and_the_global_tokens_are_those_of_the_paper() -> None:
    qkv, places = states(200), torch.arange(200)
    distance = places[:, None] - places
    seen = {
        "longformer": (distance < 24) | (places < 3),
        "strided": (distance < 24) | (distance % 24 == 0),
    }
    for kind, pattern in seen.items():
        expected = functional.scaled_dot_product_attention(
            *qkv, attn_mask=pattern & (distance >= 0), enable_gqa=True
        )
        output = attend(kind, SMALL[kind], *qkv)
        torch.testing.assert_close(output, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_earlier_blocks_are_seen_as_means_of_their_tokens() -> None:
    block, means = SMALL["linformer"]["window"], SMALL["linformer"]["features"]
    query, key, value = qkv = states(100)
    output = attend("linformer", SMALL["linformer"], *qkv)
    for place in (5, 23, 24, 60, 99):
        start, each = place // block * block, block // means
        seen = []
        for part in (key[0], value[0]):
            mean = part[:, :start].unflatten(1, (-1, each)).mean(2)
            seen.append(torch.cat([mean, part[:, start : place + 1]], 1))
        expected = _softmax_over(query[0, :, place], *seen)
        torch.testing.assert_close(output[0, place], expected, rtol=1e-4, atol=1e-5)


def test_tokens_of_the_same_hash_are_seen() -> None:
    """The latest tokens of a bucket, in either round, and the token itself."""
    sizes = SMALL["reformer"]
    query, key, value = qkv = states(100)
    output = attend("reformer", sizes, *qkv)
    hashes = []
    for number in range(2):
        shape = (WIDTH, sizes["buckets"] // 2)
        drawn = normal(shape, 0, f"{MODULE.layer_idx}.{number}", query.device)
        sides = [torch.cat([part[0] @ drawn, -part[0] @ drawn], -1) for part in (query, key)]
        hashes.append([side.argmax(-1) for side in sides])
    for head, place in itertools.product(range(HEADS), (0, 7, 50, 99)):
        shared = head // (HEADS // KEY_HEADS)
        seen = {place}
        for of_queries, of_keys in hashes:
            alike = of_keys[shared, : place + 1] == of_queries[head, place]
            seen |= {*alike.nonzero()[:, 0].tolist()[-sizes["window"] :]}
        keys = sorted(seen)
        weights = (query[0, head, place] @ key[0, shared, keys].T * WIDTH**-0.5).softmax(-1)
        expected = weights @ value[0, shared, keys]
        torch.testing.assert_close(output[0, place, head], expected, rtol=1e-4, atol=1e-5)


def _softmax_over(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return (heads, width) from (heads, width) and twice (key heads, keys, width)."""
    keys, values = (part.repeat_interleave(HEADS // KEY_HEADS, 0) for part in (keys, values))
    weights = (torch.einsum("hd,hkd->hk", query, keys) * WIDTH**-0.5).softmax(-1)
    return torch.einsum("hk,hkd->hd", weights, values)


def test_performer_error_falls_as_root_of_features() -> None:
    errors = []
    with torch.no_grad():
        qkv = [state / 2 for state in states(300)]  # three chunks
        for sizes in ({"features": 64}, {"features": 4096}):
            drawn = [attend("performer", sizes, *qkv, seed=seed) for seed in range(6)]
            errors.append(math.sqrt(float((torch.stack(drawn) - exact(*qkv)).square().mean())))
    assert 4 < errors[0] / errors[1] < 16  # 8 is expected for 64 times as many


def test_draws_are_a_function_of_seed_and_layer() -> None:
    qkv = states(100)
    for kind in ("performer", "reformer"):
        first, again, other = (attend(kind, SMALL[kind], *qkv, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_uncomputed_attention_weights_are_not_reported() -> None:
    """On a GPU, their functions get document bounds on the host, unlike those that are summed."""
    sums = AttentionSums(1, torch.ones(1, dtype=torch.bool))
    for name, is_summed in (("sdpa", True), (function_name("strided", SMALL["strided"], 0), False)):
        assert not sums.sums.any()
        own = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        with sums.recorded():
            assert (ALL_ATTENTION_FUNCTIONS.get_interface(name, None) is not own) == is_summed
    assert sums.sums.isnan().all()


def test_large_and_small_keys_do_not_overflow() -> None:
    query, key, value = states(300)
    for factor in (20.0, 1e-3):
        output = attend("performer", SMALL["performer"], factor * query, factor * key, value)
        assert output.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(output, [query, key, value]))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_bf16_is_rounded_fp32(kind: str) -> None:
    if kind == "reformer":
        pytest.skip("rounded states have other hashes")
    halves = states(200, torch.bfloat16)
    whole = [state.detach().float().requires_grad_() for state in halves]
    output, expected = (attend(kind, SMALL[kind], *qkv) for qkv in (halves, whole))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
    for own, other in zip(gradients(output, halves), gradients(expected, whole), strict=True):
        assert float((own.float() - other).norm() / other.norm()) < 0.02
