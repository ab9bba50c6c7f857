"""Copies of fragments on the host, which a save in the background writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from harness.checkpoint.fragment import Fragment

_ALIGNED_BYTES = 64  # where a copy begins: for any dtype, and whole cache lines


def pinned_bytes(count: int) -> torch.Tensor:
    """Return (count,) uint8 of host memory that an accelerator writes to by itself; where that many
    pages cannot be pinned, of ordinary memory, which is filled more slowly.
    """
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=torch.uint8)


class HostCopies:
    """Copies fragments, those on an accelerator into one buffer that is kept from save to save.

    Its pages are pinned, so that nothing is staged, and faulted in once; all copies are launched
    before the host waits, once.
    """

    def __init__(
        self,
        is_remote: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        buffer_of: Callable[[int], torch.Tensor] = pinned_bytes,
        wait: Callable[[], None] = torch.accelerator.synchronize,
    ) -> None:
        self._is_remote, self._buffer_of, self._wait = is_remote, buffer_of, wait
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Return copies on the host, whole when this returns and valid until the next call."""
        tensors = [tensor for fragment in fragments for tensor in fragment.tensors.values()]
        needed = sum(_aligned(tensor.nbytes) for tensor in tensors if self._is_remote(tensor))
        if needed > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # given back before the next is taken
            self._buffer = self._buffer_of(needed)
        end = 0
        copies = []
        for fragment in fragments:
            on_host = {}
            for kind, tensor in fragment.tensors.items():
                if self._is_remote(tensor):
                    place = self._buffer[end : end + tensor.nbytes].view(tensor.dtype)
                    on_host[kind] = place.copy_(tensor.detach(), non_blocking=True)
                    end += _aligned(tensor.nbytes)
                else:
                    on_host[kind] = tensor.detach().clone()
            copies.append(replace(fragment, tensors=on_host))
        if end:
            self._wait()
        return copies


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
