"""Causal attention within concatenated documents, without a mask: `model.attention=varlen`.

GPUs use torch's kernel, or flash-attn's for soft-capped scores; CPUs compute document by document.
All of these take (tokens, heads, head_dim) and the bounds of documents.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

try:
    from torch.nn.attention import varlen as of_torch
except ImportError:
    _TAKEN = frozenset[str]()
else:
    _TAKEN = frozenset(inspect.signature(of_torch.varlen_attn).parameters)
    """Arguments of torch's kernel: since 2.11 windows and scales, since 2.12 enable_gqa, without
    which it takes fewer key heads than others unasked."""

Kernel = Callable[..., torch.Tensor]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' signature: (batch, heads, seq_len, head_dim) each -> (batch,
    seq_len, heads, head_dim).

    `cu_seq_lens_q` (documents + 1,) int32 counts over the concatenated rows of the batch;
    `max_length_q` is the length of the longest document. Without them each row is one document.
    """
    assert not dropout, "a plan refuses dropout of attention weights with varlen"
    batch, length = query.shape[0], query.shape[2]
    bounds, longest = cu_seq_lens_q, max_length_q
    if bounds is None or longest is None:
        longest = length
        bounds = longest * torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    kernel: Kernel = _in_turn if query.device.type == "cpu" else fused_kernel
    output = kernel(
        *(states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)),
        bounds,
        longest,
        scale=scaling,
        # A window of n tokens includes n - 1 earlier ones.
        before=sliding_window - 1 if sliding_window and sliding_window < longest else -1,
        softcap=softcap,
    )
    return output.reshape(batch, length, *output.shape[1:]), None


def fused_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    before: int,
    softcap: float | None,
) -> torch.Tensor:
    """Attention on a GPU. Raises ValueError if neither torch nor flash-attn has a kernel for it."""
    inputs: Any = (query, key, value, bounds, bounds, longest, longest)
    output: Any
    if not softcap and {"scale", "window_size"} <= _TAKEN:
        shares = query.shape[1] != key.shape[1]
        asked: dict[str, Any] = {"enable_gqa": shares} if "enable_gqa" in _TAKEN else {}
        output = of_torch.varlen_attn(*inputs, scale=scale, window_size=(before, 0), **asked)
        return output  # type: ignore[no-any-return]
    try:
        package = importlib.import_module("flash_attn")
    except ImportError as error:
        lacks = "no soft-capped scores" if softcap else "no varlen_attn with windows"
        raise ValueError(f"torch {torch.__version__} has {lacks}: install flash-attn") from error
    how = {"softmax_scale": scale, "causal": True, "softcap": softcap or 0.0}
    output = package.flash_attn_varlen_func(*inputs, window_size=(before, 0), **how)
    return output  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over documents would be another graph for every batch
def _in_turn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    _longest: int,
    *,
    scale: float | None,
    before: int,
    softcap: float | None,
) -> torch.Tensor:
    one = functools.partial(alone, scale=scale, before=before, softcap=softcap)
    output: torch.Tensor = InTurn.apply(  # type: ignore[no-untyped-call]
        query, key, value, bounds.tolist(), one
    )
    return output


class InTurn(torch.autograd.Function):
    """Attention document by document. Like a kernel, it saves queries, keys, values and output,
    although the backward pass recomputes each document.
    """

    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: list[int],
        alone: Kernel,
    ) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads, head_dim); `bounds` of documents."""
        context.bounds, context.alone = bounds, alone
        output = torch.empty(query.shape, dtype=query.dtype)
        for tokens in _slices(bounds):
            output[tokens] = alone(query[tokens], key[tokens], value[tokens])
        context.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of queries, keys and values, in their shapes."""
        *states, _ = context.saved_tensors
        return *gradients_in_turn(states, context.bounds, context.alone, gradient), None, None


def gradients_in_turn(
    states: Sequence[torch.Tensor], bounds: list[int], alone: Kernel, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values, computed document by document."""
    gradients = [torch.empty(s.shape, dtype=s.dtype) for s in states]
    for tokens in _slices(bounds):
        own = [s[tokens].detach().requires_grad_() for s in states]
        with torch.enable_grad():
            output = alone(*own)
        computed = torch.autograd.grad(output, own, gradient[tokens])
        for whole, part in zip(gradients, computed, strict=True):
            whole[tokens] = part
    return gradients


def _slices(bounds: list[int]) -> Iterator[slice]:
    return (slice(*pair) for pair in itertools.pairwise(bounds))


def alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    before: int,
    softcap: float | None,
) -> torch.Tensor:
    """Return the attention of one document, (tokens, heads, head_dim)."""
    q, k, v = (states.transpose(0, 1) for states in (query, key, value))  # (heads, tokens, ...)
    k, v = (states.repeat_interleave(len(q) // len(k), 0) for states in (k, v))
    seen = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    if before >= 0:
        seen = seen.triu(-before)
    if softcap:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~seen, -torch.inf)
        output = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    elif before >= 0:
        output = functional.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    else:
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return output.transpose(0, 1)
