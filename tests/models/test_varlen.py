"""Attention within documents equals masked attention; kernels get real signatures."""

import inspect
import sys
from collections import defaultdict
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as of_torch
from transformers import modeling_flash_attention_utils as flash

from harness.data.batch import Batch
from harness.models import varlen
from harness.models.attention import attend_with
from harness.models.loss import forward
from harness.models.recompute import checkpoint_layers
from tests.gates.models import LEARNED
from tests.gates.recipe import global_batch
from tests.models.small import CPU, attention_of, built, gradients_of

in_turn = varlen._in_turn
of_2_11 = pytest.mark.skipif(
    "window_size" not in inspect.signature(of_torch.varlen_attn).parameters,
    reason="torch 2.10's kernel has no windows",
)


def learned(family: str, attention: str) -> Any:
    model = built(LEARNED[family])
    attend_with(attention, model)
    return model


def loss_and_gradients(model: Any, batch: Batch, attention: str) -> dict[str, torch.Tensor]:
    loss, _ = forward(model, *batch.on(CPU), keywords=batch.keywords(attention, CPU))
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def apart(family: str, attention: str = "varlen", **changed: Any) -> float:
    """Return the largest relative difference of loss and gradients from those with a mask."""
    masked = attention_of(LEARNED[family])
    batch = global_batch(0)
    exact = loss_and_gradients(learned(family, masked), batch, masked)
    model = learned(family, attention)
    for name, value in changed.items():
        setattr(model.config, name, value)
    other = loss_and_gradients(model, batch, attention)
    return max(float((other[n] - exact[n]).norm() / exact[n].norm()) for n in exact)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_neox", "gpt2", "phi3"])
def test_varlen_equals_mask_for_documents_windows_caps_and_gqa(family: str) -> None:
    assert apart(family) < 5e-6


def test_a_boundary_off_by_one_or_a_lost_window_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(q: Any, k: Any, v: Any, bounds: torch.Tensor, longest: int, **how: Any) -> Any:
        bounds = torch.cat([bounds[:1], bounds[1:-1] + 1, bounds[-1:]])
        return in_turn(q, k, v, bounds, longest, **how)

    def wide(*states: Any, before: int, **how: Any) -> Any:
        return in_turn(*states, before=-1, **how)

    monkeypatch.setattr(varlen, "_in_turn", late)
    assert apart("llama") > 1e-3
    monkeypatch.setattr(varlen, "_in_turn", wide)
    assert apart("mistral") > 1e-3


def test_rows_without_documents_are_documents() -> None:
    batch = global_batch(0)
    rows = Batch(batch.input_ids, batch.labels, None)
    exact = loss_and_gradients(learned("llama", "sdpa"), rows, "sdpa")
    for keywords in (rows.keywords("varlen", CPU), {}):
        loss, _ = forward(learned("llama", "varlen"), *rows.on(CPU), keywords=keywords)
        assert float(loss.detach()) == pytest.approx(float(exact["loss"]), rel=1e-6)


def test_layers_are_computed_again_with_their_documents() -> None:
    model = learned("mistral", "varlen")
    checkpoint_layers(model, "full")
    batch = global_batch(0)
    again = loss_and_gradients(model, batch, "varlen")
    exact = loss_and_gradients(learned("mistral", "varlen"), batch, "varlen")
    assert all(torch.equal(again[name], exact[name]) for name in exact)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU; the test replaces its kernels."""
    monkeypatch.setattr(varlen, "_in_turn", varlen.fused_kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed


@of_2_11
@pytest.mark.usefixtures("on_a_gpu")
def test_torchs_kernel_is_asked_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    signature, windows = inspect.signature(of_torch.varlen_attn), set()

    def stand_in(*args: Any, **keywords: Any) -> torch.Tensor:
        q, k, v, cu_q, cu_k, max_q, max_k, *more = signature.bind(*args, **keywords).args
        assert not more, "further arguments are keywords"
        asked = signature.bind(*args, **keywords).kwargs
        assert cu_q is cu_k
        assert cu_q.dtype == torch.int32
        assert (int(cu_q[0]), int(cu_q[-1])) == (0, len(q))
        assert max_q == max_k == int(cu_q.diff().max())
        assert q.dim() == k.dim() == 3
        assert {x.stride(-1) for x in (q, k, v)} == {1}
        assert asked["enable_gqa"] == (q.shape[1] != k.shape[1])
        left, right = asked["window_size"]
        assert right == 0
        windows.add(left)
        return in_turn(q, k, v, cu_q, max_q, scale=asked["scale"], before=left, softcap=None)

    monkeypatch.setattr(of_torch, "varlen_attn", stand_in)
    assert max(apart("llama"), apart("mistral")) < 5e-6
    assert windows == {-1, 7}  # a window of 8 tokens includes seven earlier ones


# torch 2.11, whose kernel accepts fewer key heads than query heads without a flag
def varlen_attn_of_2_11(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    return in_turn(
        *(query, key, value, cu_seq_q, max_q), scale=scale, before=window_size[0], softcap=None
    )


# torch 2.10
def varlen_attn_of_2_10(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: Any = None,
) -> torch.Tensor:  # fmt: skip
    raise AssertionError("it is not asked")


@pytest.mark.usefixtures("on_a_gpu")
def test_an_older_torchs_kernel_is_asked_for_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (varlen_attn_of_2_11, varlen_attn_of_2_10):
        monkeypatch.setattr(of_torch, "varlen_attn", kernel)
        monkeypatch.setattr(varlen, "_TAKEN", frozenset(inspect.signature(kernel).parameters))
        if kernel is varlen_attn_of_2_11:
            assert max(apart("llama"), apart("mistral")) < 5e-6
    with pytest.raises(ValueError, match="no varlen_attn with windows: install flash-attn"):
        apart("llama")


@of_2_11
def test_torchs_kernel_takes_its_inputs_in_16_bits_alone() -> None:
    """Its custom operator is traced on fake tensors, with gradients, with the calls made here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(20, n, 16, dtype=torch.bfloat16) for n in (4, 2, 2))
        states = [x.requires_grad_() for x in (q, k, v)]
        bounds = torch.tensor([0, 12, 20], dtype=torch.int32)
        output = varlen.fused_kernel(*states, bounds, 12, scale=0.25, before=3, softcap=None)
        output.sum().backward()
        assert output.shape == q.shape
        assert [x.grad.shape for x in states] == [x.shape for x in states]


@of_2_11
def test_a_compiled_layer_is_one_graph() -> None:
    q, k, v = (
        torch.empty(2, n, 10, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for n in (4, 2, 2)
    )
    attend = torch.compile(varlen.attend, backend="eager", fullgraph=True)
    for documents, longest in ((2, 12), (3, 11), (5, 7)):
        bounds = torch.empty(documents + 1, dtype=torch.int32, device="meta")
        how = {"cu_seq_lens_q": bounds, "max_length_q": longest, "sliding_window": 4}
        output, _ = attend(None, q, k, v, None, scaling=0.25, **how)
        assert output.shape == (2, 10, 4, 16)


# flash-attn 2.8
def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    assert causal
    assert not dropout_p
    assert cu_seqlens_q is cu_seqlens_k
    before = window_size[0]
    how = {"scale": softmax_scale, "before": before, "softcap": softcap or None}
    return in_turn(q, k, v, cu_seqlens_q, max_seqlen_q, **how)


@pytest.mark.usefixtures("on_a_gpu")
def test_soft_capped_scores_are_flash_attns(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no soft-capped scores: install flash-attn"):
        apart("gemma2")
    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert apart("gemma2") < 5e-6


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_flash_attention_waits_for_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: it searches no layer for documents, and accepts micro-batches of several sequences."""

    def looked(*_: Any) -> bool:
        raise AssertionError("transformers looks for documents on the device")

    process = partial(
        flash._process_flash_attention_kwargs,
        supports_mapping=defaultdict(
            bool, dict.fromkeys(inspect.signature(flash_attn_varlen_func).parameters, True)
        ),
    )
    functions = ((None, flash_attn_varlen_func, None, None, None), (process, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: functions)
    monkeypatch.setattr(flash, "_is_packed_sequence", looked)
    assert apart(family, "flash_attention_2") < 5e-6
