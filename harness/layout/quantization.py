"""Frozen weights in 4 bits, as bitsandbytes keeps them (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["nf4", "fp4"]
BLOCK = 64
"""Weights that share a scale, in the order of memory."""
DESCRIPTION = "quantization_config.json"
"""The file beside exported adapters with what BitsAndBytesConfig of transformers reads."""
_SCALES_BLOCK = 256  # scales that share one of their own
_FP32 = 4  # bytes
_CODES, _SCALES_CODES = 16, 256  # entries of the tables that each weight has a copy of


@dataclass(frozen=True)
class Quantization:
    """Format of quantized weights."""

    kind: Kind
    doubles: bool = True
    """True if the scales are quantized, too, to 8 bits."""

    def weight_bytes(self, elements: int) -> int:
        """Return the bytes of a weight: codes, scales and tables (bitsandbytes' QuantState)."""
        scales = -(-elements // BLOCK)
        size = -(-elements // 2) + _FP32 * _CODES
        if not self.doubles:
            return size + _FP32 * scales
        own = -(-scales // _SCALES_BLOCK) + 1  # with the mean that is taken off first
        return size + scales + _FP32 * (own + _SCALES_CODES)

    def temporary_bytes(self, elements: int, element_bytes: int) -> int:
        """Return the bytes of a weight while something is multiplied by it: its values, and its
        scales in fp32.
        """
        scales = _FP32 * -(-elements // BLOCK) if self.doubles else 0
        return element_bytes * elements + scales
