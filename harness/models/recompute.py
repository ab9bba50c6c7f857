"""Activation checkpointing of decoder layers, and activation offload to the host.

A checkpointed layer keeps only its input. With `selective` it also keeps the results of products
with a weight (mm, addmm, grouped experts) and of fused attention. These make up the cost; norms,
activation functions, rotations and sums, which are recomputed, cost almost nothing (torchtitan's
per-operation policy). Eager attention keeps no scores, which grow with the square of the sequence
length: they are recomputed (Korthikanti et al., arXiv 2205.05198, section 5), and so are exchanges
with other ranks.

torch's own contexts for this (create_selective_checkpoint_contexts) expect all operations in the
order of the forward pass. ZeRO 3 gathers weights in hooks within layers, in a different order in
the backward pass, and adds a bias in place, unseen by autograd, to a product that was kept.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from harness.layout.recompute import Checkpointing, is_checkpointed
from harness.models.attention import ATTENTION_DROPOUTS
from harness.models.flow import StandIn
from harness.models.keeping import keeps_none
from harness.models.reversible import Streams
from harness.models.units import decoder_layers


class Buffers:
    """Host memory for one model's offloaded tensors, reused from step to step.

    Pinning memory takes milliseconds per 10 MB and makes the device wait, as does freeing pinned
    memory (CUDA C++ Programming Guide, "Implicit Synchronization"). torch does not cache the larger
    blocks (engine/allocators.py).
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # by size
        self._returned: list[torch.Tensor] = []  # appended by whichever thread ended the last use

    def take(self, size: int, pinned: bool) -> torch.Tensor:
        """Return at least (size,) uint8: the smallest free buffer that fits, or a new one in place
        of the largest, so that shorter sequences reuse the buffers of longer ones.
        """
        while self._returned:
            insort(self._free, self._returned.pop(), key=torch.Tensor.numel)
        place = bisect_left(self._free, size, key=torch.Tensor.numel)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self._free.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, for copies launched from now on."""
        self._returned.append(buffer)


class HostCopy:
    """A tensor's copy in host memory, pinned if the tensor is on a GPU.

    Copies in both directions run in the device's stream order and the host never waits: the device
    copies out before it reuses the memory, and back before it reads; the next copy into the same
    buffer comes after both. On a CPU these are real copies too, so that runs without a GPU test
    that the right tensor comes back.
    """

    def __init__(self, tensor: torch.Tensor, buffers: Buffers) -> None:
        self._device, self._buffers = tensor.device, buffers
        self._buffer = buffers.take(tensor.nbytes, tensor.is_cuda)
        like = torch.empty_like(tensor, device="meta")  # dense, with the tensor's dimension order
        own = self._buffer[: tensor.nbytes].view(tensor.dtype)
        self.copy = own.as_strided(like.shape, like.stride())
        self.copy.copy_(tensor, non_blocking=tensor.is_cuda)

    def back(self) -> torch.Tensor:
        """Return the tensor on its device."""
        return self.copy.to(self._device, non_blocking=True, copy=True)

    def __del__(self) -> None:
        self._buffers.give(self._buffer)


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "bitsandbytes::gemm_4bit")


def checkpoint_layers(
    model: PreTrainedModel,
    checkpointing: Checkpointing,
    to_host: bool = False,
    compiled: bool = False,
) -> None:
    """Make decoder layers recompute for their backward pass whatever they do not keep; in place.

    `to_host`: offload what they keep to host memory until then; `compiled`: the layers will be
    compiled, so that the compiler asks for each operation. Layers are numbered across all pipeline
    stages.
    """
    # A kept result draws no random numbers in the second pass, which would shift those of later
    # dropout.
    draws = any(getattr(model.config, key, 0) for key in ATTENTION_DROPOUTS)
    buffers = Buffers() if to_host else None
    for index, layer in enumerate(decoder_layers(model)[1]):
        if isinstance(layer, StandIn) or not is_checkpointed(checkpointing, index):
            continue
        options: dict[str, Any] = {}
        if checkpointing == "selective" and compiled:
            policy = functools.partial(_policy, not draws)
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        elif checkpointing == "selective":
            options["context_fn"] = functools.partial(_contexts, not draws, buffers)
        _checkpoint(layer, options, buffers)


def _checkpoint(layer: nn.Module, options: dict[str, Any], buffers: Buffers | None) -> None:
    """Replace a layer's forward by one that keeps its inputs, on the host if `buffers` is given."""
    inner: Callable[..., Any] = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the layer, keeping only its inputs if gradients are needed."""
        if not (layer.training and torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        hidden, *others = args or (kwargs.pop("hidden_states"),)

        def run(hidden: torch.Tensor) -> Any:
            return inner(hidden, *others, **kwargs)

        # All other arguments are shared by all layers.
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


def _policy(attention: bool, _: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return what a compiler does with an operation's result until the backward pass."""
    keeps = _is_costly(func, attention)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class Keep(TorchDispatchMode):
    """Records the results of costly operations, in order, during the first forward pass."""

    def __init__(self, results: deque[Any], attention: bool, buffers: Buffers | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self._attention, self._buffers = results, attention, buffers
        self._places: dict[int, int] = {}  # index in `results` of each kept storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in _written(func, args, kwargs or {}):
            place = self._places.pop(tensor.untyped_storage()._cdata, None)
            if place is not None:  # overwritten in place since
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
    """Returns the kept results instead of recomputing them, each once."""

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
    """Return True for fused attention of torch or of packages that register operators."""
    name = func.name()
    return "attention" in name or "attn" in name


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Saved:
    """The storages that were saved, each counted once; kept alive so that their ids stay unique."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """Total size of the storages."""
        return sum(storage.nbytes() for storage in self.storages.values())


def _of_checkpoints() -> Iterator[torch.Tensor]:
    """Yield the tensors that checkpointed layers keep without autograd's knowledge."""
    for thing in gc.get_objects():
        if type(thing) is HostCopy:
            yield thing.copy
        elif type(thing) is Streams:
            yield from thing.kept or ()
        elif type(thing) is Reuse:
            yield from (x for x in tree_leaves([*thing.results]) if isinstance(x, torch.Tensor))


@contextmanager
def saved_by(model: nn.Module) -> Iterator[Saved]:
    """Within this context, record the tensors that a forward pass of `model` saves, except
    parameters and buffers. The loss must outlive the context. Works with real and fake tensors.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved, before = Saved(), {id(tensor) for tensor in _of_checkpoints()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved.storages[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    for tensor in _of_checkpoints():
        if id(tensor) not in before:
            storage = tensor.untyped_storage()
            saved.storages[storage._cdata] = storage
