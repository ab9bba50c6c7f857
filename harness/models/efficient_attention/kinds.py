"""Kinds of efficient attention as transformers attention functions, with their sizes and the seed
in their names.
"""

from __future__ import annotations  # exports are opened by older Pythons, too

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.models.efficient_attention.patterns import (
    ByPieces,
    Linformer,
    Longformer,
    Reformer,
    Strided,
)
from harness.models.efficient_attention.performer import ByChunks, Performer
from harness.models.keeping import keeping_none

Sizes = Mapping[str, int]

KINDS: dict[str, Callable[[Sizes, int, int], Any]] = {
    "longformer": lambda sizes, *_: Longformer(sizes["window"], sizes["global"]),
    "strided": lambda sizes, *_: Strided(sizes["window"]),
    "linformer": lambda sizes, *_: Linformer(sizes["window"], sizes["features"]),
    "performer": lambda sizes, *drawn: Performer(sizes["features"], *drawn),
    "reformer": lambda sizes, *drawn: Reformer(sizes["buckets"], sizes["window"], *drawn),
}
"""Constructors of the kinds, from sizes, seed and layer."""


def function_name(attention: str, sizes: Sizes, seed: int) -> str:
    """Return an implementation's name in transformers, after registering it with its sizes."""
    if attention not in KINDS:
        return attention
    name = "_".join([attention, *map(str, sizes.values()), str(seed)])
    # Without a mask function of the same name, models create no mask.
    ALL_ATTENTION_FUNCTIONS.register(name, partial(attend, attention, {**sizes}, seed))
    return name


def is_kind(name: str) -> bool:
    """Return True if this name in transformers is a kind of efficient attention."""
    return name.partition("_")[0] in KINDS


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over documents would be another graph for every batch
def attend(
    attention: str,
    sizes: Sizes,
    seed: int,
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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' signature: (batch, heads, seq_len, head_dim) each -> (batch,
    seq_len, heads, head_dim). There may be fewer queries than keys when a text is continued.

    `cu_seq_lens_q` (documents + 1,) int32, on the host, counts over the concatenated rows of the
    batch. Without it each row is one document.
    """
    assert not dropout, "a plan refuses dropout of attention weights with a kind"
    assert not sliding_window, "a plan refuses windows of a model's own with a kind"
    assert not softcap, "a plan refuses soft-capped scores with a kind"
    batch, length, asked = key.shape[0], key.shape[2], query.shape[2]
    # When a text is continued, its first tokens come from a cache and need no output.
    if asked < length:
        query = functional.pad(query, (0, 0, length - asked, 0))
    bounds = [*range(0, batch * length + 1, length)]
    if cu_seq_lens_q is not None:
        bounds = cu_seq_lens_q.tolist()
    kind = KINDS[attention](sizes, seed, getattr(module, "layer_idx", 0))
    function: Any = ByChunks if isinstance(kind, Performer) else ByPieces
    with keeping_none():
        output: torch.Tensor = function.apply(
            *(states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)),
            bounds,
            kind,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
        )
    return output.reshape(batch, length, *output.shape[1:])[:, length - asked :], None
