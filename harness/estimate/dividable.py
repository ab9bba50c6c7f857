"""Divisions over tensor- and sequence-parallel ranks that DeepSpeed 0.19.8 really runs."""

from __future__ import annotations

from harness.estimate.inputs import Inputs
from harness.estimate.states import optimizer_class
from harness.layout.division import divided_kinds
from harness.layout.families import FAMILIES

_TENSOR, _SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"


def division_problems(inputs: Inputs) -> list[str]:
    """Return the reasons why DeepSpeed would not run a division over ranks."""
    grid, shape = inputs.grid, inputs.shape
    sizes = {"pipeline.stages": grid.pipeline, _TENSOR: grid.tensor, _SEQUENCE: grid.sequence}
    used = [f"{key} {size}" for key, size in sizes.items() if size > 1]
    problems = []
    if len(used) > 1:
        problems.append(f"{' and '.join(used)}: DeepSpeed runs only one of them at a time")
    if grid.tensor > 1 and not divided_kinds(shape):
        problems.append(
            f"{_TENSOR} is {grid.tensor}: DeepSpeed cannot divide {shape.model_type}, only "
            f"{', '.join(name for name, family in FAMILIES.items() if family.autotp)}"
        )
    return problems + (_sequence_problems(inputs) if grid.sequence > 1 else [])


def _sequence_problems(inputs: Inputs) -> list[str]:
    """Return the checks of ulysses_sp.py (__init__, register_with_transformers) that would fail."""
    shape, ranks, kv_heads = inputs.shape, inputs.grid.sequence, inputs.shape.num_kv_heads
    reasons = []
    if not shape.family.ulysses:
        families = ", ".join(name for name, family in FAMILIES.items() if family.ulysses)
        reasons.append(f"Ulysses cannot run {shape.model_type}, only {families}")
    if inputs.attention == "eager":
        reasons.append('Ulysses has no eager attention: use model.attention="sdpa"')
    if shape.num_heads % ranks:
        reasons.append(f"it must divide {shape.num_heads} attention heads")
    if kv_heads % ranks and ranks % kv_heads:
        reasons.append(f"it must divide {kv_heads} key heads, or they it")
    if inputs.seq_len % ranks:
        reasons.append(f"it must divide data.seq_len, {inputs.seq_len}")
    if optimizer_class(inputs) == "BF16_Optimizer":
        reasons.append("stage 1 in bf16 with sums in fp32 fails in its step: use stage 2 or 3")
    return [f"{_SEQUENCE} is {ranks}: {text}" for text in reasons]
