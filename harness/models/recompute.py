"""Activation checkpointing of decoder layers: the backward pass computes again what it needs.

A checkpointed layer keeps its input. With `selective` it also keeps the results of all products
with a weight (mm, addmm, grouped experts) and of fused attention: these cost the arithmetic, and
norms, activation functions, rotations and sums, which are computed again, cost next to none
(torchtitan's policy for single operations). Attention that is written out keeps no scores, which
grow with the square of the sequence: they are computed again (Korthikanti et al., arXiv 2205.05198,
section 5). So are exchanges with other ranks.

torch's own contexts for this (create_selective_checkpoint_contexts) expect every operation in the
order of the forward pass. ZeRO 3 gathers weights from hooks within layers, in another order in the
backward pass, and adds a bias in place, behind autograd's back, to a product that was kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from harness.layout.recompute import Checkpointing, is_checkpointed
from harness.models.divided_dropout import ATTENTION_DROPOUTS
from harness.models.flow import StandIn
from harness.models.host_copies import Buffers, HostCopy
from harness.models.keeping import keeps_none
from harness.models.pieces import decoder_layers

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "bitsandbytes::gemm_4bit")


def checkpoint_layers(
    model: PreTrainedModel, checkpointing: Checkpointing, to_host: bool = False
) -> None:
    """Let decoder layers compute again, for their backward pass, what they do not keep; in place.

    `to_host`: what they keep is in host memory until then. Layers are counted over all pipeline
    stages.
    """
    # A kept result draws no numbers the second time; dropout after it would get others.
    draws = any(getattr(model.config, key, 0) for key in ATTENTION_DROPOUTS)
    buffers = Buffers() if to_host else None
    for index, layer in enumerate(decoder_layers(model)[1]):
        if isinstance(layer, StandIn) or not is_checkpointed(checkpointing, index):
            continue
        options: dict[str, Any] = {}
        if checkpointing == "selective":
            options["context_fn"] = functools.partial(_contexts, not draws, buffers)
        _checkpoint(layer, options, buffers)


def _checkpoint(layer: nn.Module, options: dict[str, Any], buffers: Buffers | None) -> None:
    """Replace a layer's forward by one that keeps its inputs, in `buffers` of the host if any."""
    inner: Callable[..., Any] = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the layer, keeping its inputs alone while gradients are wanted."""
        if not (layer.training and torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        hidden, *others = args or (kwargs.pop("hidden_states"),)

        def run(hidden: torch.Tensor) -> Any:
            return inner(hidden, *others, **kwargs)

        # All other arguments are the same tensors for every layer.
        with _moving(buffers):
            return checkpoint(run, hidden, use_reentrant=False, **options)

    layer.forward = forward


def _moving(buffers: Buffers | None) -> contextlib.AbstractContextManager[Any]:
    if buffers is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda tensor: HostCopy(tensor, buffers), HostCopy.back)


def _contexts(attention: bool, buffers: Buffers | None) -> tuple[Keep, Reuse]:
    results: deque[Any] = deque()
    return Keep(results, attention, buffers), Reuse(results, attention)


class Keep(TorchDispatchMode):
    """Keeps the results of costly operations, in their order; of the first forward pass."""

    def __init__(self, results: deque[Any], attention: bool, buffers: Buffers | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self._attention, self._buffers = results, attention, buffers
        self._places: dict[int, int] = {}  # in `results`, of each kept storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in _written(func, args, kwargs or {}):
            place = self._places.pop(tensor.untyped_storage()._cdata, None)
            if place is not None:  # no longer what the operation gave
                self.results[place] = None
        if _is_costly(func, self._attention):
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor):
                    self._places[tensor.untyped_storage()._cdata] = len(self.results)
            self.results.append(tree_map_only(torch.Tensor, self._kept, output))
        return output

    def _kept(self, result: torch.Tensor) -> HostCopy | torch.Tensor:
        return result.detach() if self._buffers is None else HostCopy(result, self._buffers)


class Reuse(TorchDispatchMode):
    """Takes what was kept instead of computing it again; each result once."""

    def __init__(self, results: deque[Any], attention: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self._attention = results, attention

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kept = self.results.popleft() if _is_costly(func, self._attention) else None
        if kept is None:
            return func(*args, **(kwargs or {}))
        return tree_map_only(HostCopy, HostCopy.back, kept)


def _is_costly(func: Any, attention: bool) -> bool:
    return not keeps_none() and (_is_product(func) or (attention and _is_fused_attention(func)))


@functools.cache
def _is_product(func: Any) -> bool:
    return func.name() in _PRODUCTS


@functools.cache
def _is_fused_attention(func: Any) -> bool:
    """Of torch itself, and of the packages that register operators."""
    name = func.name()
    return "attention" in name or "attn" in name


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
