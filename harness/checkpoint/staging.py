"""Tensors of an accelerator on their way to a file and back, through one pinned buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from harness.checkpoint.host_copies import pinned_bytes

PART_BYTES = 2**25  # of each half of the buffer; a bus moves it in two milliseconds


class Staging:
    """A buffer in two halves that is kept: while one is hashed or sent, the other is filled."""

    def __init__(
        self,
        is_remote: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        buffer_of: Callable[[int], torch.Tensor] = pinned_bytes,
        sent: Callable[[torch.device], Callable[[], object]] | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`sent`: what waits until all that was launched on a device before it has happened."""
        self.is_remote, self._buffer_of, self._part_bytes = is_remote, buffer_of, part_bytes
        self._sent = sent or _recorded
        self._halves: list[torch.Tensor] = []
        self._users: list[Callable[[], object]] = []

    def on_host(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a tensor's bytes in order, uint8 on the host; those of an accelerator in parts,
        each of them whole until `used_until` of it has returned.
        """
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if not self.is_remote(tensor):
            yield flat
            return
        for part in flat.split(self._part_bytes):
            yield self._free_half()[: part.numel()].copy_(part)

    def fill(
        self, out: torch.Tensor, dtype: torch.dtype, read: Callable[[torch.Tensor], None]
    ) -> None:
        """Fill flat `out` on an accelerator with elements that `read` gets as `dtype`, in order.

        The last may still be on their way when this returns, ahead of what is launched then.
        """
        for part in out.split(self._part_bytes // dtype.itemsize):
            half = self._free_half()[: part.numel() * dtype.itemsize].view(dtype)
            read(half)
            # Converted where it arrives: copy_ would convert on the host first.
            there = half if part.dtype == dtype else half.to(part.device, non_blocking=True)
            part.copy_(there, non_blocking=True)
            self.used_until(self._sent(part.device))

    def used_until(self, done: Callable[[], object]) -> None:
        """Let the half that was filled last be filled again only after `done` has returned."""
        self._users[-1] = done

    def _free_half(self) -> torch.Tensor:
        if not self._halves:
            self._halves = [*self._buffer_of(2 * self._part_bytes).split(self._part_bytes)]
            self._users = [lambda: None] * 2
        self._halves.append(self._halves.pop(0))
        self._users.append(self._users.pop(0))
        self._users[-1]()
        self._users[-1] = lambda: None
        return self._halves[-1]


def _recorded(device: torch.device) -> Callable[[], object]:
    event = torch.accelerator.current_stream(device).record_event()
    wait: Callable[[], object] = event.synchronize
    return wait


STAGING = Staging()
"""Of this process, which saves or loads one tensor at a time. What is on the host needs none."""
