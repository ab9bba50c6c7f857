"""Activations that wait in host memory for their backward pass."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch


class Buffers:
    """Host memory of one model's copies, kept from step to step.

    Page-locking memory takes milliseconds for each 10 MB, and the device waits for it, as it does
    when such memory is given back (CUDA C++ Programming Guide, "Implicit Synchronization"); torch
    keeps none of the larger blocks (engine/allocators.py).
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # by size
        self._returned: list[torch.Tensor] = []  # by whichever thread ended the last use

    def take(self, size: int, pinned: bool) -> torch.Tensor:
        """Return at least (size,) uint8: the smallest that is free, or a new one for the largest.

        Steps of shorter sequences use what longer ones have left.
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
        """Take a buffer back, for copies that are launched from now on."""
        self._returned.append(buffer)


class HostCopy:
    """A tensor's copy in host memory, pinned where the tensor is on a GPU.

    Both copies run in the device's own order and nothing waits for them on the host: the device
    copies out before it reuses the memory, and back before it reads; the next copy out into the
    same buffer comes after both. On a CPU these are real copies, too, so that a run without GPU
    proves that the right one comes back.
    """

    def __init__(self, tensor: torch.Tensor, buffers: Buffers) -> None:
        self._device, self._buffers = tensor.device, buffers
        self._buffer = buffers.take(tensor.nbytes, tensor.is_cuda)
        like = torch.empty_like(tensor, device="meta")  # dense, in the tensor's own order
        own = self._buffer[: tensor.nbytes].view(tensor.dtype)
        self.copy = own.as_strided(like.shape, like.stride())
        self.copy.copy_(tensor, non_blocking=tensor.is_cuda)

    def back(self) -> torch.Tensor:
        """Return the tensor on its device."""
        return self.copy.to(self._device, non_blocking=True, copy=True)

    def __del__(self) -> None:
        self._buffers.give(self._buffer)
