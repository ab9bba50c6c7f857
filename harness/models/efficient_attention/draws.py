"""Random numbers that depend only on a seed and a name, identical on every rank and device."""

from __future__ import annotations

import functools
import hashlib

import torch


# Cached on the device: each copy to it would make the host wait.
@functools.lru_cache(maxsize=1024)
def normal(shape: tuple[int, ...], seed: int, name: str, device: torch.device) -> torch.Tensor:
    """Return normally distributed numbers in fp32."""
    return _drawn(shape, seed, name).to(device)


@functools.lru_cache(maxsize=1024)
def orthogonal(rows: int, width: int, seed: int, name: str, device: torch.device) -> torch.Tensor:
    """Return (rows, width) fp32: orthogonal in blocks of `width` rows, each row with the length of
    a normal vector (arXiv 2009.14794, section 2.4).
    """
    blocks = -(-rows // width)
    drawn = _drawn((2, blocks, width, width), seed, name)
    turned, triangle = torch.linalg.qr(drawn[0].double())
    turned = turned * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # otherwise not uniform
    long: torch.Tensor = turned.mT.float() * drawn[1].norm(dim=-1, keepdim=True)
    return long.flatten(0, 1)[:rows].to(device)


def _drawn(shape: tuple[int, ...], seed: int, name: str) -> torch.Tensor:
    """Return normally distributed numbers in fp32, on the CPU."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)
