"""Low-rank adapters (arXiv 2106.09685) and 4-bit frozen weights (arXiv 2305.14314)."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.layout.shape import Seen, Shape, Tensor, active_parameters, all_tokens, flops_per_token

Kind = Literal["nf4", "fp4"]
BLOCK = 64
"""Consecutive weights that share a scale."""
DESCRIPTION = "quantization_config.json"
"""The file beside exported adapters that transformers' BitsAndBytesConfig reads."""
_SCALES_BLOCK = 256  # quantized scales that share a scale
_FP32 = 4  # bytes
_CODES, _SCALES_CODES = 16, 256  # entries of the lookup tables stored with each weight


def quiet_bitsandbytes() -> None:
    """Silence bitsandbytes about a missing CPU kernel, before peft or a model imports it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Quantization:
    """Format of quantized weights."""

    kind: Kind
    doubles: bool = True
    """True if the scales are also quantized, to 8 bits."""

    def weight_bytes(self, elements: int) -> int:
        """Return the bytes of a weight: codes, scales and tables (bitsandbytes' QuantState)."""
        scales = -(-elements // BLOCK)
        size = -(-elements // 2) + _FP32 * _CODES
        if not self.doubles:
            return size + _FP32 * scales
        own = -(-scales // _SCALES_BLOCK) + 1  # plus the mean, which is subtracted first
        return size + scales + _FP32 * (own + _SCALES_CODES)

    def temporary_bytes(self, elements: int, element_bytes: int) -> int:
        """Return a weight's bytes while it is multiplied: its values, and its scales in fp32."""
        scales = _FP32 * -(-elements // BLOCK) if self.doubles else 0
        return element_bytes * elements + scales


NAME = "default"
"""peft's adapter name, which is part of its parameter names."""
# Kinds of tensors in torch's Linear modules; experts and routers are bare parameters.
_LINEAR = ("attention", "states", "mlp")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: W becomes W + scale * B A in linear maps of its decoder layers."""

    rank: int
    targets: tuple[str, ...] = ()
    """Last parts of the names of the linear maps; empty: all."""
    has_magnitudes: bool = False
    """True for DoRA (arXiv 2402.09353), which also learns the norm of each row of W + B A."""
    quantization: Quantization | None = None
    """Applies to the weights of all linear maps, even without an adapter; None keeps the run's
    dtype.
    """
    whole: tuple[str, ...] = ()
    """Last parts of the names of modules that are trained in full, beside the adapters."""

    def tensors(self, shape: Shape) -> Iterator[Tensor]:
        """Yield the trained parameters: first those of the adapters, named as in peft, in model
        order; then those of modules trained in full.

        A (rank, inputs) and B (outputs, rank), preceded by (outputs,) magnitudes if there are any.
        """
        for name, inputs, outputs in self.linear_maps(shape):
            if self.has_magnitudes:
                magnitudes = f"{name}.lora_magnitude_vector.{NAME}.weight"
                yield Tensor(magnitudes, (outputs,), "adapter")
            yield Tensor(f"{name}.lora_A.{NAME}.weight", (self.rank, inputs), "adapter")
            yield Tensor(f"{name}.lora_B.{NAME}.weight", (outputs, self.rank), "adapter")
        yield from self.trained_whole(shape)

    def trained_whole(self, shape: Shape) -> Iterator[Tensor]:
        """Yield the parameters of the model that are trained in full."""
        for tensor in shape.tensors():
            if module_of(tensor.name) in self.whole:
                yield tensor

    def linear_maps(self, shape: Shape) -> Iterator[tuple[str, int, int]]:
        """Yield (name, inputs, outputs) of each linear map that gets an adapter."""
        is_transposed = any(module.transposed for module in shape.family.layers)
        for tensor in linear_weights(shape):
            name = tensor.name.removesuffix(".weight")
            if not self.targets or name.rpartition(".")[2] in self.targets:
                first, second = tensor.shape
                inputs, outputs = (first, second) if is_transposed else (second, first)
                yield name, inputs, outputs

    def flops_per_token(self, shape: Shape, seq_len: int, seen: Seen = all_tokens) -> float:
        """Return the training FLOPs per token of a sequence of `seq_len` tokens, counted as in
        layout.shape. Frozen weights have no gradient, which saves a third of their operations.
        """
        whole = {tensor.name: tensor for tensor in self.trained_whole(shape)}
        added = sum(tensor.numel for tensor in self.tensors(shape) if tensor.name not in whole)
        # An embedding is a lookup: its gradient needs no matrix product.
        own = sum(tensor.numel for tensor in whole.values() if tensor.kind != "embedding")
        frozen = active_parameters(shape) - own
        return flops_per_token(shape, seq_len, seen) - 2 * frozen + 6 * added


def module_of(name: str) -> str:
    """Return the last part of the name of a parameter's module."""
    return name.rpartition(".")[0].rpartition(".")[2]


def linear_weights(shape: Shape) -> Iterator[Tensor]:
    """Yield the weights of all linear maps in the decoder layers."""
    for tensor in shape.tensors():
        if tensor.name.startswith(shape.body.layer_prefix) and is_linear(tensor):
            yield tensor


def is_linear(tensor: Tensor) -> bool:
    """Return True if a tensor of a decoder layer is the weight of a linear map."""
    return len(tensor.shape) == 2 and tensor.kind in _LINEAR and tensor.name.endswith(".weight")
