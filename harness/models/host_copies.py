"""Activations that wait in host memory for their backward pass."""

from __future__ import annotations

import torch


class HostCopy:
    """A tensor's copy in host memory, pinned where the tensor is on a GPU.

    Both copies run in the device's own order and nothing waits for them on the host: the device
    copies out before it reuses the memory, and back before it reads. On a CPU it is a real copy,
    too, so that a run without GPU proves that the right one comes back.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=tensor.is_cuda)

    def back(self) -> torch.Tensor:
        """Return the tensor on its device."""
        return self.copy.to(self._device, non_blocking=True)
