"""Stand-ins for the kernels of state-space and delta-rule layers, which save the same tensors.

mamba-ssm, causal-conv1d and flash-linear-attention run only on GPUs. `stand_in` installs modules
under their names. The stand-in functions compute nothing: they return tensors of the right shapes
and save the tensors that the packages' sources pass to `save_for_backward`, so that their bytes can
be traced.
"""

import math
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from harness.layout.world import STATE_KERNELS

_SCAN_CHUNK = 2048
"""Tokens between two states that selective_scan_cuda keeps (csrc/selective_scan.cpp)."""
_DELTA_CHUNK = 64
"""Tokens per chunk of the delta rule (fla/ops/gated_delta_rule/chunk.py)."""


class _Kept(torch.autograd.Function):
    """Saves tensors for an output that was not computed from them."""

    calls = 0
    """Number of calls in this process."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, *kept: Any) -> torch.Tensor:
        _Kept.calls += 1
        context.save_for_backward(*(tensor for tensor in kept if torch.is_tensor(tensor)))
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise RuntimeError("a stand-in for a kernel has no gradient")


def _keeping(output: torch.Tensor, *kept: Any) -> torch.Tensor:
    """Return `output` as the result of a kernel that saves the tensors among `kept`."""
    result: torch.Tensor = _Kept.apply(output.requires_grad_(), *kept)  # type: ignore[no-untyped-call]
    return result


def _by_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor with a contiguous last dimension, copied if necessary."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """(batch, channels, tokens) -> the same (causal_conv1d_interface.py: CausalConv1dFn)."""
    x = x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()
    return _keeping(torch.empty_like(x), x, weight, bias, seq_idx)


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(batch, channels, tokens) -> the same (selective_scan_interface.py: SelectiveScanFn)."""
    rows = [_by_rows(tensor) for tensor in (u, delta, B, C, z)]
    states = _states(u, A)
    made = torch.empty_like(u, memory_format=torch.contiguous_format)
    gated = [torch.empty_like(made)] if z is not None else []
    output = _keeping(made, *rows, A, D, delta_bias, states, *gated)
    return (output, states[:, :, -1, 1::2]) if return_last_state else output


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
) -> torch.Tensor:
    """(batch, 2 x channels, tokens) -> (batch, tokens, hidden) (selective_scan_interface.py:
    MambaInnerFn, which recomputes convolution and time steps).
    """
    (batch, channels, tokens), rank = xz.shape, A.shape[-1]
    projected = xz.new_empty(batch * tokens, x_proj_weight.shape[0])
    maps = [tensor if tensor is not None else _row(xz, rank) for tensor in (B, C)]
    scanned = xz.new_empty(batch, channels // 2, tokens)
    output = xz.new_empty(batch, tokens, out_proj_weight.shape[0])
    weights = conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight
    states = _states(scanned, A)
    return _keeping(
        output, _by_rows(xz), *weights, projected, A, *maps, D, delta_bias, states, scanned
    )


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(batch, tokens, heads, head_dim) -> the same (triton/ssd_combined.py:
    MambaChunkScanCombinedFn).
    """
    batch, tokens, heads, size = x.shape
    chunks = -(-tokens // chunk_size)
    sums = x.new_empty(batch, heads, chunks, chunk_size, dtype=torch.float32)
    made = x.new_empty(x.shape)
    output = _keeping(made, x, dt, sums, A, B, C, D, z, dt_bias, initial_states, seq_idx, made)
    last = x.new_empty(batch, heads, size, B.shape[-1], dtype=torch.float32)
    return (output, last) if return_final_states else output


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """(batch, tokens, projected) -> (batch, tokens, hidden) (triton/ssd_combined.py:
    MambaSplitConv1dScanCombinedFn, which recomputes everything except the scan).
    """
    batch, tokens, _ = zxbcdt.shape
    heads, size = D.shape[0], headdim or D.shape[-1]
    scanned = zxbcdt.new_empty(batch, tokens, heads, size)
    norms = None
    if rmsnorm_weight is not None:
        norms = zxbcdt.new_empty(batch * tokens * ngroups, dtype=torch.float32)
    width = heads * size if outproj_weight is None else outproj_weight.shape[0]
    output = zxbcdt.new_empty(batch, tokens, width)
    weights = conv1d_weight, conv1d_bias, rmsnorm_weight, outproj_weight, outproj_bias
    states = initial_states, seq_idx
    return _keeping(output, zxbcdt, *weights, scanned, A, D, dt_bias, *states, norms)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """(batch, tokens, heads, head_dim) -> the same, and no final state (gated_delta_rule/chunk.py:
    ChunkGatedDeltaRuleFunction).
    """
    query, key, value = (tensor.contiguous() for tensor in (q, k, v))
    roots: list[torch.Tensor] = []
    if use_qk_l2norm_in_kernel:  # saves normalised queries and keys, and their divisors
        roots = [q.new_empty(tensor.shape[:-1], dtype=torch.float32) for tensor in (q, k)]
        query, key = torch.empty_like(query), torch.empty_like(key)
    sums = torch.empty_like(g, dtype=torch.float32)
    within = k.new_empty(*v.shape[:-1], _DELTA_CHUNK)
    kept = (*roots, query, key, value, sums, beta, within, initial_state, cu_seqlens)
    return _keeping(torch.empty_like(value), *kept), None


def _states(scanned: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """Return the states that a scan of (batch, channels, tokens) keeps, in fp32."""
    batch, channels, tokens = scanned.shape
    chunks = -(-tokens // _SCAN_CHUNK)
    return scanned.new_empty(batch, channels, chunks, 2 * A.shape[-1], dtype=torch.float32)


def _row(xz: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a map into or out of the state that depends on the tokens (B or C)."""
    batch, _, tokens = xz.shape
    return xz.new_empty(batch, 1, rank, tokens)


_FUNCTIONS = {
    "causal_conv1d": (causal_conv1d_fn,),
    "mamba_ssm": (
        *(selective_scan_fn, mamba_inner_fn),
        *(mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined),
    ),
    "fla": (chunk_gated_delta_rule,),
}


def were_called() -> bool:
    """Return True if a stand-in was called in this process."""
    return _Kept.calls > 0


def stand_in(packages: Collection[str]) -> None:
    """Install stand-ins for the kernels of these packages, and hide the others from transformers
    even if installed. Call it before importing a model family's file, which looks for them.
    """
    for name in STATE_KERNELS:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for function in _FUNCTIONS[name] if name in packages else ():
            setattr(module, function.__name__, function)
        sys.modules[name] = module
