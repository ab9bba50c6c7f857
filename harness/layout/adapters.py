"""Adapters of low rank (arXiv 2106.09685), and 4-bit weights beside them (arXiv 2305.14314)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.layout.shape import Seen, Shape, Tensor, active_parameters, all_tokens, flops_per_token

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


NAME = "default"
"""peft's name of the adapters, a part of their parameters' names."""
# Kinds of tensors that modules of torch's Linear hold; experts and routers are bare parameters.
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
    """Of the weights of all linear maps, those without an adapter, too; None: as the run."""
    whole: tuple[str, ...] = ()
    """Last parts of the names of modules that are trained themselves, beside the adapters."""

    def tensors(self, shape: Shape) -> Iterator[Tensor]:
        """Yield the parameters that are trained: those of the adapters, as peft names them, in the
        model's order, then those of modules that are trained whole.

        A (rank, inputs) and B (outputs, rank); with magnitudes a row (outputs,) before them.
        """
        for name, inputs, outputs in self.linear_maps(shape):
            if self.has_magnitudes:
                magnitudes = f"{name}.lora_magnitude_vector.{NAME}.weight"
                yield Tensor(magnitudes, (outputs,), "adapter")
            yield Tensor(f"{name}.lora_A.{NAME}.weight", (self.rank, inputs), "adapter")
            yield Tensor(f"{name}.lora_B.{NAME}.weight", (outputs, self.rank), "adapter")
        yield from self.trained_whole(shape)

    def trained_whole(self, shape: Shape) -> Iterator[Tensor]:
        """Yield the parameters of the model that are trained themselves."""
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
        """Floating-point operations that training spends on one token of `seq_len`, counted as
        layout.shape counts them: frozen weights have no gradient, a third of their operations.
        """
        whole = {tensor.name: tensor for tensor in self.trained_whole(shape)}
        added = sum(tensor.numel for tensor in self.tensors(shape) if tensor.name not in whole)
        # An embedding is looked up: its gradient multiplies nothing.
        own = sum(tensor.numel for tensor in whole.values() if tensor.kind != "embedding")
        frozen = active_parameters(shape) - own
        return flops_per_token(shape, seq_len, seen) - 2 * frozen + 6 * added


def module_of(name: str) -> str:
    """Return the last part of the name of the module that has a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def linear_weights(shape: Shape) -> Iterator[Tensor]:
    """Yield the weights of the linear maps in a model's decoder layers."""
    for tensor in shape.tensors():
        if tensor.name.startswith(shape.body.layer_prefix) and is_linear(tensor):
            yield tensor


def is_linear(tensor: Tensor) -> bool:
    """Return True for the weight of a linear map, if the tensor is one of a decoder layer."""
    return len(tensor.shape) == 2 and tensor.kind in _LINEAR and tensor.name.endswith(".weight")
